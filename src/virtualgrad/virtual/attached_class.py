"""Encapsulation 1, the classes: a subclass for each class of modules, whose forward runs them.

A module with parameters, itself or in its children, runs under the interception: it is on while the
code of the module runs.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

from virtualgrad.virtual.compiled_class import Told, Way, run_compiled
from virtualgrad.virtual.leaves import Leaf, is_sequence, leaf_of
from virtualgrad.virtual.models import BINDING
from virtualgrad.virtual.synchronised import seen

if TYPE_CHECKING:
    from virtualgrad.virtual.attach import Attachment
    from virtualgrad.virtual.intercept import Intercept


def attachments_in(cls: type) -> list[Attachment]:
    """The attachments that have given a class to a module, the last one first."""
    bindings = [each.__dict__.get(BINDING) for each in cls.__mro__]
    return [binding for binding in bindings if binding is not None]


class Bound(NamedTuple):
    """What an attachment knows of a module to which it has given a class.

    Attributes:
        module: the module; a copy that a class makes of itself by its own means is a plain one.
        kind: the class that it was given.
        run: the method of that class by which it runs.
        path: its name in the model.
        leaf: what its forward does, if that is known.
        own: what it calls its tracked parameters -> their names.
        intercept: of the attachment.
        others: attachments that have given it a class before.
        hides_parameters: whether its forward calls its op by a Function that torch has written.
    """

    module: nn.Module
    kind: type[nn.Module]
    run: Any
    path: str
    leaf: Leaf | None
    own: Mapping[str, str]
    intercept: Intercept
    others: tuple[Attachment, ...]
    hides_parameters: bool


class Classes:
    """The classes that an attachment gives to modules, one for each class that it meets.

    (One for each module would cost more at every call: Python remembers what it has looked up in a
    class, for some thousand names of all classes together.)
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._bound: dict[int, Bound] = {}
        self._classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}

    def watched(self, module: nn.Module, path: str) -> type[nn.Module]:
        """A subclass of the module's class that runs it under the interception."""
        base = type(module)
        # A forward that was put on the module itself hides the one of its class: go round it.
        method = "__call__" if "forward" in vars(module) else "forward"
        if (base, method) not in self._classes:
            run = _run_watched(self._attachment, base, method, self._bound)
            self._classes[base, method] = _subclass(self._attachment, base, method, run)
        kind = self._classes[base, method]
        others = tuple(attachments_in(base))
        for each in (self._attachment, *others) if others else ():
            each.intercept.is_shared = True
            each.intercept.renew()
        self._bound[id(module)] = Bound(
            module,
            kind,
            vars(kind)[method],
            path,
            leaf_of(module) if method == "forward" else None,
            self._attachment.intercept.own_parameters(module),
            self._attachment.intercept,
            others,
            isinstance(module, nn.SyncBatchNorm) and method == "forward",
        )
        return kind

    def tell(self, module_id: int) -> Told | None:
        """What a compiler must know of a module; None if it runs as it is."""
        known = self._bound.get(module_id)
        if known is None:
            return None
        way: Way = "left out" if self._is_left_out(known) else ""
        if known.hides_parameters:
            way = "hides parameters"
        if any(other.is_attached for other in known.others):
            return known.path, way, "pair"
        intercept = self._attachment.intercept
        if intercept.is_sharded:
            return known.path, way, "shards"
        intercept.was_compiled = True  # there will be no marks any more
        return known.path, way, "marks" if intercept.has_marks_on else ""

    def _is_left_out(self, known: Bound) -> bool:
        """Whether a module is just a norm of torch.nn, where T leaves out all of them."""
        if known.leaf is None or not known.leaf.is_norm:
            return False
        parameters = [each for each in known.module._parameters.values() if each is not None]
        is_plain = all(type(each) is nn.Parameter for each in parameters)
        leaves_out = self._attachment.intercept.leaves_norms_out
        return leaves_out and is_plain and known.leaf.is_all_of(known.module)

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Let go of some modules."""
        for module in modules:
            self._bound.pop(id(module), None)


def _run_watched(
    attachment: Attachment, base: type[nn.Module], method: str, bound: Mapping[int, Bound]
) -> Callable[..., Any]:
    """The method of a class whose modules run under the interception."""
    intercept = attachment.intercept
    in_cpp = intercept.in_cpp
    run_sequence = functools.partial(intercept.run_sequence, bound)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return run_compiled(attachment, getattr(base, method), self, args, kwargs)
        if in_cpp.run is not None and len(args) == 1 and not kwargs:
            done = in_cpp.run(self, args[0])
            if done is not NotImplemented:
                return done
        forward = getattr(base, method)  # others may have put theirs in its place since
        known = bound.get(id(self))
        if known is None or known.module is not self:
            return forward(self, *args, **kwargs)
        if not attachment.active or not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if intercept.is_sharded:
            intercept.meet(self, known.own)
        if len(args) == 1 and not kwargs:
            return run_on_one(known, forward, self, args)
        return run_by_call(known, forward, self, args, kwargs)

    def run_on_one(known: Bound, forward: Any, self: nn.Module, args: tuple[Any]) -> Any:
        done = memory = None
        if known.leaf is not None:
            done = intercept.run_leaf(known.leaf, known.path, forward, self, args[0])
        elif is_sequence(forward):
            forward = run_sequence
        if done is None:
            done = run_by_call(known, forward, self, args, {})
        if not intercept.is_shared and not known.hides_parameters:
            if known.leaf is not None:
                memory = intercept.memory_of(known.leaf, known.path, self)
            in_cpp.learn(known, base, method, memory)
        return done

    def run_by_call(known: Bound, forward: Any, self: nn.Module, args: Any, kwargs: Any) -> Any:
        if known.hides_parameters:
            forward = seen(forward, intercept, known.path)
        return attachment.call(known.path, forward, self, args, kwargs)

    return run


def _subclass(
    attachment: Attachment, base: type[nn.Module], method: str, run: Callable[..., Any]
) -> type[nn.Module]:
    """A subclass with the same name and another method; copies and pickles know nothing of it."""
    plain = getattr(base, method)
    functools.update_wrapper(run, plain)
    run.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined] # trainers read it
    # accelerate and others undo what they wrapped by following __wrapped__: they must stop here.
    del run.__wrapped__  # type: ignore[attr-defined]

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = base.__reduce_ex__(self, protocol)
        function, arguments, *rest = reduced
        if function is copyreg.__newobj__ and arguments[0] is cls:  # type: ignore[attr-defined]
            # pickle insists that __newobj__ makes the object's own class; this one does not care.
            return (copyreg._reconstructor, (base, object, None), *rest)  # type: ignore[attr-defined]
        by_base = tuple(base if argument is cls else argument for argument in arguments)
        return (base if function is cls else function, by_base, *rest)

    @functools.wraps(base.zero_grad)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        base.zero_grad(self, *args, **kwargs)
        if attachment.active and self is attachment.model:
            attachment.cleared()

    namespace = {
        method: run,
        "zero_grad": zero_grad,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        BINDING: attachment,
    }
    cls: type[nn.Module] = type(base.__name__, (base,), namespace)
    return cls
