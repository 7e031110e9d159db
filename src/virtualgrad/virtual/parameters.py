"""Encapsulation 1, the names: which tracked parameter a tensor is, whatever its guise.

An op seldom gets the very tensor that the optimizer has: autocast hands it a copy, a transposed
layer a view, FSDP a gathered tensor. Behind each of these the parameter is still itself, and T
belongs to the op that computes with it. So tensors are followed here by identity.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.virtual.ops import CONTAINERS, tensors_in
from virtualgrad.virtual.tracking import View

_editions = itertools.count()


class TrackedParameters:
    """The tracked parameters, and in a pass what is a view, copy or cast of one.

    Attributes:
        names: id of a parameter, or of a tensor that stands in for it -> its name.
        views: tensors of this pass behind which there is a parameter. Whoever runs an op looks
            first whether there are any: most passes have none.
        edition: another one whenever a compiler might be told otherwise than before, of modules or
            parameters; no two models have the same. All that it guards of them. (A string: it may
            take numbers for variables.)
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.views: dict[int, View] = {}
        self.renew()
        self._parameters: dict[str, Tensor] = {}  # kept alive: an id stays its parameter's own
        self._replaced: dict[int, weakref.ref[Tensor]] = {}  # as long as others keep them alive
        self._gathered: dict[str, Tensor] = {}

    def renew(self) -> None:
        """Have compilers ask again: something has changed of which they were told."""
        self.edition = f"{next(_editions)}"

    def add(self, parameters: Mapping[str, Tensor]) -> None:
        """Track more parameters, or others under the same names."""
        for name, parameter in parameters.items():
            if self.is_replaced(name, parameter):
                old = self._parameters[name]
                self._replaced[id(old)] = weakref.ref(old, functools.partial(self._forget, id(old)))
        self._parameters.update(parameters)
        self.names.update({id(p): name for name, p in parameters.items()})
        self.renew()

    def __getitem__(self, name: str) -> Tensor:
        return self._parameters[name]

    def all(self) -> Iterable[Tensor]:
        """The tracked parameters; of one that was tied, and is no longer, both."""
        replaced = [known() for known in self._replaced.values()]
        return [*self._parameters.values(), *(p for p in replaced if p is not None)]

    def _forget(self, key: int, _: object) -> None:
        """Forget a parameter that was replaced, and is no longer: others may get its id."""
        self._replaced.pop(key, None)
        self.names.pop(key, None)

    def has_shards(self) -> bool:
        """Whether some parameters are sharded, so that others stand in for them in a forward."""
        return any(hasattr(p, "to_local") for p in self._parameters.values())

    def is_replaced(self, name: str, parameter: Tensor) -> bool:
        """Whether another parameter was tracked under this name."""
        return self._parameters.get(name, parameter) is not parameter

    # ---------------------------------------------------------------- of a module

    def own_parameters(self, module: nn.Module) -> dict[str, str]:
        """What a module calls its tracked parameters -> their names (a tied one has one name)."""
        own = ((short, self.names.get(id(p))) for short, p in module._parameters.items())
        return {short: name for short, name in own if name is not None}

    def meet(self, module: nn.Module, own: Mapping[str, str]) -> None:
        """Learn the tensors that stand in for a module's sharded parameters while it runs.

        FSDP gathers a parameter into another tensor before the module's forward.
        """
        for short, name in own.items():
            tensor = module._parameters[short]
            if tensor is not None and id(tensor) not in self.names:
                self.names[id(tensor)] = name
                self._gathered[name] = tensor  # kept alive, as above

    # ---------------------------------------------------------------- of a tensor

    def name_of(self, tensor: Tensor) -> str | None:
        """Name of the tracked parameter that a tensor is, or is a view of."""
        if isinstance(tensor, nn.Parameter):
            name = self.own_name_of(tensor)
            if name is not None:
                return name if tensor.requires_grad else None
        view = self.view_of(tensor)
        return None if view is None else view.parameter

    def own_name_of(self, parameter: Tensor) -> str | None:
        """Name of a parameter, if it is a tracked one itself."""
        if is_compiling():
            return self._tell(id(parameter), self.edition)
        return self.names.get(id(parameter))

    @settled_while_tracing
    def _tell(self, parameter_id: int, edition: str) -> str | None:
        """Name of a parameter, for a compiler, which guards its id and the edition."""
        return self.names.get(parameter_id)

    def may_be_among(self, arguments: Iterable[Any]) -> bool:
        """Whether a tracked parameter, or a view of one, may be among an op's arguments.

        Made for speed: most ops of a model take none. Containers within containers may hold one.
        """
        names, views = self.names, self.views
        for value in arguments:
            if id(value) in names or id(value) in views:
                return True
            if isinstance(value, CONTAINERS) and (
                isinstance(value, dict)
                or any(
                    id(item) in names or id(item) in views or isinstance(item, CONTAINERS)
                    for item in value
                )
            ):
                return True
        return False

    def name_with_offset(self, tensor: Tensor) -> str:
        """Name of a tracked parameter, frozen or not; of a slice, also where it begins.

        So an expert of a stack keeps its r while others get no rows.
        """
        own = self.own_name_of(tensor) if isinstance(tensor, nn.Parameter) else None
        if own is not None:
            return own
        view = self.view_of(tensor)
        if view is None:
            return ""
        whole = self._gathered.get(view.parameter, self._parameters[view.parameter])
        if view.strided.numel() >= whole.numel():
            return view.parameter
        return f"{view.parameter}@{_offset(view.strided, whole)}"

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter of anybody's, or a view of a tracked one."""
        return isinstance(tensor, nn.Parameter) or self.view_of(tensor) is not None

    # ---------------------------------------------------------------- views

    def view_of(self, tensor: Tensor) -> View | None:
        """What a tensor is a view of, if it is one of a tracked parameter.

        A copy that was changed in place is none any more: it has other values.
        """
        if not self.views:
            return None
        if not is_compiling():
            known = self.views.get(id(tensor))
            return None if known is None or known.is_overwritten() else known
        for view in self.views.values():  # a compiler would guard the id of an input
            if view.tensor is tensor:
                return view
        return None

    def has_living_views(self) -> bool:
        """Whether code of this pass still has a view of a parameter; those that it has not go.

        (Eagerly: what holds a tensor in Python is counted, less what is held here.)
        """
        views = self.views.values()
        ours = Counter(id(t) for view in views for t in (view.tensor, view.strided, view.owner))
        self.views = {
            key: view
            for key, view in self.views.items()
            if sys.getrefcount(view.tensor) > ours[id(view.tensor)] + 1  # the one that asks
        }
        return bool(self.views)

    def strided(self, tensor: Tensor) -> Tensor:
        """A tensor with the same axes whose strides tell where the parameter was expanded."""
        view = self.view_of(tensor)
        return tensor if view is None else view.strided

    def follow(self, source: Tensor, result: Any, copied: bool) -> None:
        """Follow a parameter into what a transparent function has made of it.

        Args:
            source: what the function was given: the parameter, a view of one, or anything else.
            result: of the function: one tensor, or several.
            copied: whether the function copies; the strides of a copy tell nothing.
        """
        name = self.name_of(source)
        if name is None:
            return
        known = self.view_of(source)
        strided, owner = (source, source) if known is None else (known.strided, known.owner)
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                like = strided if copied else tensor
                of = tensor if copied and tensor is not source else owner
                if is_compiling():  # which has no id for what it has not made yet
                    self.views[len(self.views)] = View(name, tensor, like, of)
                elif id(tensor._base) in self.names:
                    self.views[id(tensor)] = View(name, tensor, like, of)
                elif tensor is not source:
                    made = tensor.grad_fn, tensor._version
                    self.views[id(tensor)] = View(name, tensor, like, of, *made)

    def drop_overwritten(self, tensor: Tensor) -> None:
        """In a compiled pass: a tensor was overwritten, and with it all that shares its memory.

        (Eagerly every tensor tells it itself, see :meth:`view_of`.)
        """
        view = self.view_of(tensor)
        if view is not None:
            left = [other for other in self.views.values() if other.owner is not view.owner]
            self.views = dict(enumerate(left))


@settled_while_tracing
def _offset(part: Tensor, whole: Tensor) -> int:
    """How many numbers into a parameter a view of it begins."""
    return int(part.storage_offset() - whole.storage_offset())
