"""Encapsulation 1 for convolutions: one forward, and the two halves of the backward by hand.

As in :mod:`.products`, the op runs once, as it is. ``convolution_backward`` is torch's own: asked
for one of its outputs at a time, it computes each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.channels import Channels, Convolved, Total, Window
from virtualgrad.virtual.ops import (
    LAYER,
    Transforms,
    as_dtype,
    in_autocast,
    total_for_bias,
    transformed_gradients,
)

_BACKWARD = torch.ops.aten.convolution_backward.default


@dataclass(frozen=True)
class Geometry:
    """Everything of a convolution but its tensors; one number per spatial axis."""

    op: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int

    @cached_property  # asked for in every pass
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.op.startswith("conv_transpose")

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run the convolution; torch's own, whatever others have put into torch.nn.functional."""
        result: Tensor = getattr(torch, self.op)(x, weight, bias, *self._behind_tensors)
        return result

    @cached_property
    def _behind_tensors(self) -> tuple[Any, ...]:
        """What the op takes behind its tensors; by position, which costs less than by name."""
        if self.transposed:
            return self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return self.stride, self.padding, self.dilation, self.groups

    @cached_property
    def window(self) -> Window | None:
        """As below."""
        return window_of(self)

    def channels(
        self, x: Tensor, kernel: tuple[int, ...], in_rows: bool, total: Total | None
    ) -> Channels:
        """What the layer tells T of the channels of its g, and of the x and W that made sigma."""
        convolved = None
        if self.window is not None and kernels.may_launch(x.device):
            convolved = Convolved(x, kernel, self.window)
        return Channels(1, in_rows, total, convolved=convolved)

    @cached_property
    def in_backward(self) -> tuple[Any, ...]:
        """What ``convolution_backward`` takes between its tensors and its mask."""
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )


def window_of(shape: Geometry) -> Window | None:
    """What x the weight meets, of images in one group; None of other convolutions."""
    if shape.op != "conv2d" or shape.groups != 1:
        return None
    return Window(shape.stride, shape.padding, shape.dilation)


def geometry(op: str, arguments: Mapping[str, Any]) -> Geometry | None:
    """Read the geometry off a call; None for one that only the general way handles.

    That is an input without a batch, or a padding given by name.
    """
    space: int = arguments["weight"].dim() - 2
    padding = arguments.get("padding", 0)
    if arguments["input"].dim() != space + 2 or isinstance(padding, str):
        return None

    def per_axis(value: Any) -> tuple[int, ...]:
        numbers: tuple[int, ...] = (value,) if isinstance(value, int) else tuple(value)
        return numbers * (space // len(numbers))  # one number stands for every axis

    return Geometry(
        op,
        stride=per_axis(arguments.get("stride", 1)),
        padding=per_axis(padding),
        dilation=per_axis(arguments.get("dilation", 1)),
        output_padding=per_axis(arguments.get("output_padding", 0)),
        groups=arguments.get("groups", 1),
    )


class Convolution(torch.autograd.Function):
    """sigma = x * W + b;  g to x,  T(g) to W and b."""

    @staticmethod
    def forward(  # noqa: PLR0917 - apply takes no keywords
        ctx: Any,
        transforms: Transforms,
        shape: Geometry,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Run the convolution."""
        ctx.dtypes = (x.dtype, weight.dtype)
        x, weight = in_autocast(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.transforms = transforms
        ctx.shape = shape
        ctx.bias = None if bias is None else (list(bias.shape), bias.dtype)
        ctx.set_materialize_grads(False)
        return shape.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        if g is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        needs, bias, shape = ctx.needs_input_grad, ctx.bias, ctx.shape
        in_rows = weight.numel() < g.numel() and not shape.transposed
        needed = (needs[2], needs[3], bias is not None and needs[4])
        # Autocast runs the op in g's dtype; every factor follows it, and comes back.
        x = as_dtype(x, g.dtype)
        total = total_for_bias(ctx.transforms, needed)
        channels = shape.channels(x, weight.shape[2:], in_rows, total)
        for_x, for_weight, for_bias = transformed_gradients(ctx, g, LAYER, needed, channels)
        factors = x, as_dtype(weight, g.dtype), None if bias is None else bias[0]
        grad_x = grad_weight = grad_bias = None
        if for_weight is not None and for_weight.weight is not None:
            grad_weight = as_dtype(for_weight.weight, ctx.dtypes[1])
        elif for_weight is not None:  # with it, whatever is to pull back the same
            with_x = for_x is not None and for_x.g is for_weight.g
            with_bias = (
                for_bias is not None and for_bias.g is for_weight.g and for_bias.total is None
            )
            grad_x, grad_weight, grad_bias = _BACKWARD(
                for_weight.g, *factors, *shape.in_backward, [with_x, True, with_bias]
            )
            grad_weight = for_weight.scaled(as_dtype(grad_weight, ctx.dtypes[1]))
        del for_weight  # and T(g) with it, unless the bias has it, too, before more is made
        if for_bias is not None:
            grad_bias = for_bias.total if grad_bias is None else grad_bias
            if grad_bias is None:
                grad_bias = for_bias.g.sum([axis for axis in range(g.dim()) if axis != 1])
            grad_bias = for_bias.scaled(as_dtype(grad_bias, bias[1]))
        del for_bias
        if for_x is not None:
            if grad_x is None:
                mask = [True, False, False]
                grad_x = _BACKWARD(for_x.g, *factors, *shape.in_backward, mask)[0]
            grad_x = as_dtype(grad_x, ctx.dtypes[0])
        return None, None, grad_x, grad_weight, grad_bias
