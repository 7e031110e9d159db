r"""Encapsulation 1, compiled: where T multiplies whole rows, let it multiply the weight's gradient.

Where r has one number per row of a weight (an output channel), so has T's factor: T(g) = f g, and
the pull-back of T(g) is f times that of g. As all of it is known before the backward pass (r is
that of before the step), the op needs no second half. It runs as

    sigma = Seen(op(x, Rows(theta)))

with two identities: in the backward pass ``Seen`` notes g for the next r, and ``Rows`` multiplies
the gradient of theta by f. One g serves x and theta, and T(g), as large as sigma, is never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators import RMS, identity
from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.sites import Site
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.ops import map_arguments
from virtualgrad.virtual.plans import Plan

HAS_ROWS = ("linear", "conv1d", "conv2d", "conv3d")
"""Ops whose weight and bias have a row for each channel of sigma."""


class Rows(torch.autograd.Function):
    """theta itself; in backward its gradient times f, a number for each row."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, theta: Tensor) -> Tensor:
        """Return theta; compilers want another tensor, and make none."""
        ctx.save_for_backward(factor)
        return theta.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return f times the gradient, computed in f's precision and rounded once."""
        (factor,) = ctx.saved_tensors
        rows = factor.reshape(-1, *([1] * (gradient.dim() - 1)))
        return None, (gradient * rows).to(gradient.dtype)


class Seen(torch.autograd.Function):
    """sigma itself; in backward g itself, of which T's new state is prepared."""

    @staticmethod
    def forward(ctx: Any, passed: InCompiledPass, sigma: Tensor) -> Tensor:
        """Return sigma, as above."""
        ctx.passed = passed
        return sigma.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return g."""
        if not ctx.passed.rms.learns_nothing(g):
            ctx.passed.note(g)
        return None, g


def run_by_rows(call: Call, plan: Plan, sigma: Tensor) -> Tensor | None:
    """Run an op by its rows, in a compiled pass; None where T is not of that kind there.

    Args:
        call: the op.
        plan: the parts of its site.
        sigma: a value of the same shape, strides and dtype.
    """
    if not _may_have_rows(call.rule.op) or sigma.is_complex():
        return None
    axis = sigma.dim() - 1
    if call.rule.op != "linear":
        axis = sigma.dim() - call.bound["weight"].dim() + 1  # 1, or 0 for a lone sample
    elif sigma.dim() == 2 or call.bound["weight"].dim() != 2:
        return None  # T(g) is smaller than the weight, and made where g is; or there are no rows
    passes: list[InCompiledPass] = []
    scaled: list[tuple[Tensor, Tensor]] = []
    for part, operator in plan:
        if operator is identity:
            continue  # the true g
        if not isinstance(operator, RMS) or not has_rows(operator, part, axis):
            return None
        passed = InCompiledPass(operator, part, sigma)
        factor = passed.factor()
        passes.append(passed)
        served = [use.tensor for use in call.uses if use.parameter in part.parameters]
        if any([tensor.dim() == 0 or tensor.shape[0] != sigma.shape[axis] for tensor in served]):
            return None  # a bias that is broadcast
        scaled += [(tensor, Rows.apply(factor, tensor)) for tensor in served]

    def replaced(tensor: Tensor) -> Tensor:
        return next((new for old, new in scaled if old is tensor), tensor)

    args, kwargs = map_arguments(call.args, call.kwargs, replaced)
    result: Tensor = call.function(*args, **kwargs)
    for passed in passes:
        result = Seen.apply(passed, result)
    return result


@settled_while_tracing
def _may_have_rows(op: str) -> bool:
    return op in HAS_ROWS


def has_rows(rms: RMS, site: Site, axis: int) -> bool:
    """Whether T(g) is f g with an f that is known before g, one number per index of an axis."""
    if not rms.stale or not rms.is_plain:
        return False
    layout = rms.layout_at(site)
    averaged = layout.averaged_axes(rms.share_positions)
    axes = range(len(layout.view))
    return site.shape == layout.view and all([(a in averaged) != (a == axis) for a in axes])
