"""Encapsulation 1, from a call to its site: what sigma is here, and what it is called.

Read off the arguments of one torch function: the tracked parameters in which it is linear, the
name of its output sigma, and which axes of sigma come from the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from virtualgrad.compiling import fixed
from virtualgrad.sites import Site, read_layout
from virtualgrad.sites.axes import broadcast
from virtualgrad.sites.functions import FunctionRule
from virtualgrad.virtual.calls import Call, Use
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.tracking import Pass


def uses_in(
    rule: FunctionRule, bound: dict[str, Any], tensors: list[Tensor], tracked: TrackedParameters
) -> list[Use]:
    """Tracked parameters in which a call is linear: each stands in it once."""
    uses = []
    for argument, role, tensor in rule.operands(bound):
        name = tracked.name_of(tensor)
        if name is not None:
            uses.append(Use(argument, role, tensor, name, tracked.strided(tensor)))
    if not uses or not rule.is_linear(bound):
        return []
    everywhere = [tracked.name_of(tensor) for tensor in tensors]
    return [use for use in uses if everywhere.count(use.parameter) == 1]


def key_of(
    rule: FunctionRule,
    bound: dict[str, Any],
    tracked: TrackedParameters,
    path: str | None,
    current: Pass,
) -> str:
    """Name of sigma: module, op, first parameter, and which use of it this is in this pass.

    The first parameter counts even while it is frozen, so that the name, and r with it,
    outlasts parameters that thaw or come later.
    """
    first = ""
    for _, _, tensor in rule.operands(bound):
        first = tracked.name_with_offset(tensor)
        if first:
            break
    path = path or ""
    key = f"{path or '(model)'}:{rule.op}({first.removeprefix(f'{path}.')})"
    number = fixed(current.uses.get(key, 0))
    current.uses[key] = number + 1
    return key if number == 0 else f"{key}#{number}"


def split_key(key: str) -> tuple[str, int]:
    """Name of sigma without the number of the use, and that number."""
    name, numbered, number = key.rpartition(")#")  # a name within may have a # of its own
    return (f"{name})", int(number)) if numbered else (key, 0)


def site_of(
    call: Call,
    shape: tuple[int, ...],
    tracked: TrackedParameters,
    batch_size: int | None,
    batch_dim: int,
) -> Site:
    """The site of a call whose sigma has this shape, with the axes of sigma read."""
    axes: set[int] = set()
    for use in call.uses:
        axes |= call.rule.axes(len(shape), use.argument, use.strided, call.bound)
    tensors = call.tensors
    if "running_mean" in call.bound:  # of data, but neither parameters nor samples
        mean, variance = call.bound["running_mean"], call.bound.get("running_var")
        tensors = [tensor for tensor in tensors if tensor is not mean and tensor is not variance]
    alone = all([tracked.is_parameter(tensor) for tensor in tensors])
    if alone:  # no samples but those along which a parameter was expanded
        axes = _axes_of_all(call, tensors, tracked, len(shape))
    layout = read_layout(
        shape,
        frozenset(axes),
        batch_size=batch_size,
        batch_dim=fixed(batch_dim),
        foldable=call.rule.foldable and not alone,
    )
    parameters = tuple(use.parameter for use in call.uses)
    roles = tuple(use.role for use in call.uses)
    return Site(call.key, call.rule.op, parameters, roles, True, shape, layout)


def _axes_of_all(
    call: Call, tensors: list[Tensor], tracked: TrackedParameters, rank: int
) -> set[int]:
    """Axes of sigma along which some tensor differs, be the op linear in it or not."""
    axes: set[int] = set()
    others = list(tensors)
    for argument, _, tensor in call.rule.operands(call.bound):
        axes |= call.rule.axes(rank, argument, tracked.strided(tensor), call.bound)
        places = [place for place, other in enumerate(others) if other is tensor]
        del others[places[-1]]  # once: it may also stand where the op is not linear in it
    for tensor in others:
        axes |= broadcast(rank, "", tracked.strided(tensor), call.bound)
    return axes
