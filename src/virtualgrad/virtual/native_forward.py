"""Encapsulation 1, forward passes by C++, where :mod:`virtualgrad.native` was built.

A layer of torch.nn that can run as it was run before (:mod:`.memories`) is written down here for
C++ (``forward.h``): all that :meth:`.Leaf.is_all_of` and :class:`.Layer` look at, as objects that
must be the very same, and the situations in which it was run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.compiler import is_compiling
from torch.nn.modules import module as of_all

from virtualgrad.native import built
from virtualgrad.virtual import leaves
from virtualgrad.virtual.leaves import Leaf, is_sequence
from virtualgrad.virtual.ops import Transforms
from virtualgrad.virtual.remembered import Layer, LeftOut, Part
from virtualgrad.virtual.tracking import Pass, Transform

if TYPE_CHECKING:
    from virtualgrad.virtual.attached_class import Bound

SITUATIONS_IN_CPP = 8
"""Of a layer, the last ones: they are compared one by one."""

NOTHING = ...
"""Where a dict must have nothing of a name."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "conv1d": ("stride", "padding", "dilation", "groups", "padding_mode"),
    "conv2d": ("stride", "padding", "dilation", "groups", "padding_mode"),
    "conv3d": ("stride", "padding", "dilation", "groups", "padding_mode"),
    "batch_norm": ("training", "track_running_stats", "momentum", "eps", "_buffers"),
    "layer_norm": ("normalized_shape", "eps"),
    "group_norm": ("num_groups", "eps"),
}
"""Op -> the attributes of a layer by which its forward goes."""

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

AXES: dict[type[nn.Module], list[int]] = {
    nn.BatchNorm1d: [2, 3],
    nn.BatchNorm2d: [4],
    nn.BatchNorm3d: [5],
}
"""How many axes an input may have."""


class InCpp:
    """The modules of a model that C++ runs again.

    Attributes:
        run: (module, input) -> output, or NotImplemented where Python has to run it; None as long
            as nothing is known.
    """

    def __init__(self) -> None:
        self.run: Callable[[nn.Module, Any], Any] | None = None
        self._known: Any = None
        self._learned: dict[int, tuple[LeftOut | Layer | None, int]] = {}

    def begin(self, current: Pass, batch_dim: int) -> None:
        """What is run from now on, in this thread, belongs to a pass."""
        if self._known is not None:
            self._known.begin(current, current.batch_size, batch_dim)

    def end(self) -> None:
        """What is run from now on, Python has to run."""
        if self._known is not None:
            self._known.end()

    def clear(self) -> None:
        """Forget all modules."""
        self._learned.clear()
        if self._known is not None:
            self._known.clear()

    def learn(
        self, bound: Bound, base: type[nn.Module], method: str, memory: LeftOut | Layer | None
    ) -> None:
        """Have C++ run a module from now on as it was run just now, where it was built.

        Args:
            bound: the module.
            base: its class, as it was before.
            method: by which it runs there.
            memory: how it was run, if it is a layer of torch.nn.
        """
        if is_compiling():  # behind a graph break: what is found here is no tensor's
            return
        runs = 0
        if memory is not None:
            runs = len(memory.numbers if isinstance(memory, LeftOut) else memory.parts)
        known = self._learned.get(id(bound.module))
        if known is not None and known[0] is memory and known[1] == runs:
            return
        library = built()
        if library is None:
            return
        self._learned[id(bound.module)] = memory, runs
        if self._known is None:
            self._known = library.KnownModules()
            self.run = self._known.run
        with DisableTorchFunctionSubclass():
            made = self._made(library, bound, base, method, memory)
        if made is not None:
            made.came_by(bound.kind, bound.run)
            self._known.put(bound.module, made)

    def _made(
        self,
        library: ModuleType,
        bound: Bound,
        base: type[nn.Module],
        method: str,
        memory: LeftOut | Layer | None,
    ) -> Any:
        """A module for C++ to run; None if it is none that can."""
        if bound.leaf is not None:
            if isinstance(memory, LeftOut):
                return _left_out_layer(library, bound.leaf, bound.module, memory)
            return memory and _layer_with_t(library, bound.leaf, bound.module, memory)
        if method == "forward" and is_sequence(base.forward):
            where = (bound.path, bound.intercept, _calls(library), self._known)
            return library.KnownSequence(bound.module, base, *where)
        return library.KnownModule(bound.module, base, method, bound.path, bound.intercept)


@cache
def _calls(library: ModuleType) -> Any:
    """What a call of a module is, for C++."""
    hooks = [
        of_all._global_forward_hooks,
        of_all._global_forward_pre_hooks,
        of_all._global_backward_hooks,
        of_all._global_backward_pre_hooks,
    ]
    return library.Calls(vars(leaves), vars(torch.autograd.profiler), hooks)


def _layer_with_t(library: ModuleType, leaf: Leaf, module: nn.Module, memory: Layer) -> Any:
    """A layer at which T acts, in the situations in which it was run last."""
    if not _is_known(leaf, module) or not _is_as_run(library, leaf, module, memory):
        return None
    batches = _counted_batches(leaf, module)
    known = _known_layer(library, leaf, module, memory, layer=memory.apply, batches=batches)
    last = islice(reversed(memory.parts.items()), SITUATIONS_IN_CPP)
    for (number, weight, x, *others), parts in last:
        if all(type(size) is int for size in (*weight, *x)):  # none of a nested tensor's
            known.add((number, list(weight), list(x), *others), library.Parts(*_parts(parts)))
    return known


def _left_out_layer(library: ModuleType, leaf: Leaf, module: nn.Module, memory: LeftOut) -> Any:
    """A layer that T leaves out."""
    if not _is_known(leaf, module) or not _is_left_out(module, memory):
        return None
    layer = _without_t(library, leaf, module)
    batches = None if layer is None else _counted_batches(leaf, module)
    uses = (list(memory.numbers), AXES.get(leaf.layer, []))
    return _known_layer(library, leaf, module, memory, layer=layer, batches=batches, left_out=uses)


def _known_layer(
    library: ModuleType, leaf: Leaf, module: nn.Module, memory: LeftOut | Layer, **how: Any
) -> Any:
    parameters = [each for each in module._parameters.values() if each is not None]
    return library.KnownLayer(
        module=module,
        own=vars(module),
        entries=_entries(leaf, module),
        attributes=_attributes(leaf, module),
        wanted=[(each, each.requires_grad) for each in parameters],
        key=memory.key,
        weight=memory.weight,
        forward=leaf.forward,
        **{"left_out": None, **how},
    )


def _is_known(leaf: Leaf, module: nn.Module) -> bool:
    """Whether all is known by which the forward of a layer goes."""
    own = vars(module)
    return leaf.is_all_of(module) and all(name in own for name in OPTIONS[leaf.name])


def _is_left_out(module: nn.Module, memory: LeftOut) -> bool:
    """Whether T leaves a layer out, as it was remembered."""
    parameters = module._parameters
    if parameters["weight"] is not memory.weight or parameters["bias"] is not memory.bias:
        return False
    return all(each.requires_grad for each in (memory.weight, memory.bias) if each is not None)


def _is_as_run(library: ModuleType, leaf: Leaf, module: nn.Module, memory: Layer) -> bool:
    """Whether a layer runs by a node of C++, and has what it was run with."""
    if not isinstance(memory.apply, library.Layer) or leaf.behind_input is None:
        return False
    behind = leaf.behind_input(module)
    if behind is None or len(behind) != len(memory.behind_input):
        return False
    is_same = all(map(operator.is_, behind, memory.behind_input))
    return is_same and all(tensor.requires_grad is wanted for _, tensor, wanted in memory.tensors)


def _without_t(library: ModuleType, leaf: Leaf, module: Any) -> Any:
    """A norm that T leaves out, to be run by C++; None: its forward runs."""
    unasked = (None, None, None)  # of T nobody will ask
    if leaf.name == "layer_norm":
        shape, weight, bias, eps = leaf.behind_input(module)  # type: ignore[misc]
        return library.LayerNorm(weight, bias, *unasked, list(shape), eps)
    behind = leaf.behind_input(module) if leaf.name == "batch_norm" else None  # type: ignore[misc]
    if behind is None or type(module.momentum) is not float:
        return None
    mean, variance, weight, bias, by_batch, momentum, eps = behind
    return library.BatchNorm(weight, bias, *unasked, mean, variance, by_batch, momentum, eps)


def _counted_batches(leaf: Leaf, module: Any) -> Tensor | None:
    """What counts the batches of a norm, if they are counted."""
    if leaf.count is None or not (module.training and module.track_running_stats):
        return None
    batches: Tensor | None = module.num_batches_tracked
    return batches


def _entries(leaf: Leaf, module: nn.Module) -> list[tuple[Any, str, Any]]:
    """What dicts must have for a layer to run as it did: (dict, name, value)."""
    names = OPTIONS[leaf.name]
    own, parameters, buffers = vars(module), module._parameters, module._buffers
    found: list[tuple[Any, str, Any]] = [(vars(F), leaf.name, leaf.function)]
    found += [(own, name, own[name]) for name in ("_parameters", *names)]
    found += [(parameters, name, parameters[name]) for name in ("weight", "bias")]
    found += [(own, name, NOTHING) for name in ("_conv_forward", "_check_input_dim")]
    if "_buffers" in names:
        found += [(buffers, name, buffers.get(name, NOTHING)) for name in BUFFERS]
    return found


def _attributes(leaf: Leaf, module: nn.Module) -> list[tuple[type, str, Any]]:
    """What classes must have for a layer to run as it did: (class, name, value)."""
    found: list[tuple[type, str, Any]] = [(leaf.layer, "forward", leaf.forward)]
    return found if leaf.inner is None else [*found, (type(module), "_conv_forward", leaf.inner)]


def _parts(parts: Sequence[Part]) -> tuple[Callable[[Pass], Transforms], Any, Any, bool]:
    """What makes the transforms of a pass; if it is one, its operator, its site, whom it serves."""

    def make(current: Pass) -> Transforms:
        made: Transforms = {}
        for site, acting, arguments in parts:
            made.update(dict.fromkeys(arguments, Transform(acting, site, current)))
        return made

    if len(parts) == 1:
        site, acting, arguments = parts[0]
        if "weight" in arguments and "input" not in arguments:
            return make, acting, site, "bias" in arguments
    return make, None, None, False
