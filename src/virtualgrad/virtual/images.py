r"""Encapsulation 1, compiled: a convolution of images whose weight gradient is an op of its own.

    sigma = x * W + b;      g to x by torch's own,   T(g) to W and b

The op (:mod:`~virtualgrad.operators.weights_op`) reads g where it lies: T(g), as large as sigma, is
not made. As in :mod:`.tokens`, the pull-back into x is written in front of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators import weights_op
from virtualgrad.operators.channels import Convolved, Window
from virtualgrad.operators.kernels_of_weights import MOST_OF_SAMPLE, layer_of
from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.operators.weight_tiles import is_worth
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.compiled_layers import How, how_in, only_part, operands
from virtualgrad.virtual.convolutions import geometry, window_of
from virtualgrad.virtual.plans import Plan


class Images(torch.autograd.Function):
    """The layer; T acts on g, or, where the rows of theta are multiplied instead, only sees it."""

    @staticmethod
    def forward(  # noqa: PLR0917 - apply takes no keywords
        ctx: Any, how: How, window: Window, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Run the convolution."""
        ctx.how, ctx.window = how, window
        # A copy, which costs a compiler nothing unless x is overwritten later.
        ctx.save_for_backward(x.clone(), weight)
        return torch.conv2d(x, weight, bias, *window)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        how, window = ctx.how, ctx.window
        others = (False, [0, 0], 1, [True, False, False])  # of these gradients, only that of x
        grad_x = torch.ops.aten.convolution_backward(g, x, weight, None, *window, *others)[0]
        convolved = Convolved(x, (weight.shape[2], weight.shape[3]), window)
        grad_weight, grad_bias = how.passed.for_images(
            g, convolved, only_seen=how.only_seen, total=how.total
        )
        grad_bias = None if grad_bias is None else grad_bias.to(g.dtype)
        return None, None, grad_x, grad_weight, grad_bias


def run_by_images(call: Call, plan: Plan, sigma: Tensor) -> Tensor | None:
    """Run a convolution of images, in a compiled pass; None where T or the op is of another kind.

    Args:
        call: the op.
        plan: the parts of its site.
        sigma: its value.
    """
    if call.rule.op != "conv2d" or not weights_op.is_usable(sigma.device, sigma.dtype):
        return None  # asked first, as a compiler traces all that follows
    shape, part = geometry(call.rule.op, call.bound), only_part(call, plan)
    window = None if shape is None else window_of(shape)
    if window is None or part is None or sigma.dim() != 4:
        return None
    passed = InCompiledPass(part.rms, part.site, sigma)
    how = how_in(part, passed, axis=1)
    if part.rms.share_positions and not how.only_seen:
        return None  # r is updated first, and there is none for each position
    if not _suits(call, how, sigma):
        return None
    result: Tensor = Images.apply(how, window, *operands(call, how, sigma))
    return result


def _suits(call: Call, how: How, sigma: Tensor) -> bool:
    """Whether the op suits a layer, and is faster than torch's."""
    if not how.passed.sees_images(sigma):
        return False
    k, height, width = call.bound["input"].shape[1:]
    kernel = call.bound["weight"].shape[2:]
    worth = is_worth(layer_of(sigma, k, kernel), writes=not how.only_seen)
    return worth and k * height * width < MOST_OF_SAMPLE
