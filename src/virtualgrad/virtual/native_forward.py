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
from torch.nn.modules import module as of_all

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


def known_module(  # noqa: PLR0917 - what is known of it
    library: ModuleType,
    others: Any,
    bound: Bound,
    base: type[nn.Module],
    method: str,
    memory: LeftOut | Layer | None,
    intercept: Any,
) -> Any:
    """A module for C++ to run again; None if it is none that can.

    Args:
        library: the built one.
        others: the modules that it knows.
        bound: the module.
        base, method: its class, as it was before, and what runs it there.
        memory: how it was run, if it is a layer of torch.nn.
        intercept: the interception of its model.
    """
    if bound.leaf is not None and memory is not None:
        return _known_layer(library, bound.leaf, bound.module, memory)
    where = (bound.path, intercept)
    if method == "forward" and is_sequence(base.forward):
        return library.KnownSequence(bound.module, base, *where, _calls(library), others)
    return library.KnownModule(bound.module, base, method, *where)


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


def _known_layer(
    library: ModuleType, leaf: Leaf, module: nn.Module, memory: LeftOut | Layer
) -> Any:
    """A layer for C++ to run again; None if it is none that can.

    Args:
        library: the built one.
        leaf: what the layer does.
        module: the layer, which was run just now.
        memory: how it was run.
    """
    own, names = vars(module), OPTIONS[leaf.name]
    if not leaf.is_all_of(module) or not all(name in own for name in names):
        return None
    is_left_out = isinstance(memory, LeftOut)
    if not (
        _is_left_out(module, memory) if is_left_out else _is_as_run(library, leaf, module, memory)
    ):
        return None
    layer = _without_t(library, leaf, module) if is_left_out else memory.apply
    known = library.KnownLayer(
        module=module,
        own=own,
        entries=_entries(leaf, module, names),
        attributes=_attributes(leaf, module),
        wanted=[(t, t.requires_grad) for t in module._parameters.values() if t is not None],
        key=memory.key,
        weight=memory.weight,
        layer=layer,
        forward=leaf.forward,
        left_out=(list(memory.numbers), AXES.get(leaf.layer, [])) if is_left_out else None,
        batches=None if layer is None else _counted_batches(leaf, module),
    )
    if not is_left_out:
        last = islice(reversed(memory.parts.items()), SITUATIONS_IN_CPP)
        for (number, weight, x, *others), parts in last:
            if all(type(size) is int for size in (*weight, *x)):  # none of a nested tensor's
                known.add((number, list(weight), list(x), *others), library.Parts(*_parts(parts)))
    return known


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


def _entries(leaf: Leaf, module: nn.Module, names: Sequence[str]) -> list[tuple[Any, str, Any]]:
    """What dicts must have for a layer to run as it did: (dict, name, value)."""
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
    """What makes the transforms of a pass; if there is one, its operator and site; whom it serves."""

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
