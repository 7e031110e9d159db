"""Encapsulation 1 for matrix products: one forward, and the two halves of the backward by hand.

The general way of :mod:`.ops` runs an op twice. Products are where the time goes, and torch picks
their kernel by what requires grad, so a detached run may differ in the last bit. Here the op runs
once, as it is, and its backward takes g for activations and T(g) for parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.channels import Channels, Total
from virtualgrad.virtual.ops import (
    LAYER,
    Transforms,
    alias_of,
    as_dtype,
    in_autocast,
    total_for_bias,
    transformed_gradients,
)


class Linear(torch.autograd.Function):
    """sigma = x W^T + b;  g W to x,  T(g)^T x to W,  the sum of T(g) to b."""

    @staticmethod
    def forward(
        ctx: Any, transforms: Transforms, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Run F.linear."""
        needs_x, needs_weight = ctx.needs_input_grad[1:3]
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        x, weight = in_autocast(x, weight)
        # As autograd does: x only for the weight's gradient, the weight only for x's.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.size = weight.numel()
        ctx.transforms = transforms
        ctx.set_materialize_grads(False)
        # Not F.linear: what others may have put there has led here.
        return _no_view(torch._C._nn.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        if g is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        needed = [*ctx.needs_input_grad[1:3], ctx.dtypes[2] is not None and ctx.needs_input_grad[3]]
        in_rows = ctx.size < g.numel() and "input" not in ctx.transforms  # x has no such rows
        wanted = total_for_bias(ctx.transforms, needed)
        channels = channels_of_rows(g, in_rows, wanted)
        for_x, for_weight, for_bias = transformed_gradients(ctx, g, LAYER, needed, channels)
        # Autocast runs the product in g's dtype; every factor follows it, and comes back.
        grad_x = grad_weight = grad_bias = None
        if for_weight is not None:
            wide = for_weight.g if for_weight.padded is None else for_weight.padded
            grad_weight = rows(wide).t() @ as_dtype(rows(x), g.dtype)
            del wide
            if for_weight.padded is not None:
                grad_weight = grad_weight[: g.shape[-1]]
            grad_weight = for_weight.scaled(as_dtype(grad_weight, ctx.dtypes[1]))
        if for_bias is not None:
            total = rows(for_bias.g).sum(0) if for_bias.total is None else for_bias.total
            grad_bias = for_bias.scaled(as_dtype(total, ctx.dtypes[2]))
        del for_weight, for_bias  # and T(g) with them, before there is a gradient of x
        if for_x is not None:
            grad_x = rows(for_x.g) @ as_dtype(weight, g.dtype)
            grad_x = as_dtype(grad_x.view(*g.shape[:-1], weight.shape[1]), ctx.dtypes[0])
        return None, grad_x, grad_weight, grad_bias


class Matmul(torch.autograd.Function):
    """sigma = a b;  g b^T to a and a^T g to b, with T(g) in place of g for a parameter."""

    @staticmethod
    def forward(ctx: Any, transforms: Transforms, a: Tensor, b: Tensor) -> Tensor:
        """Run torch.matmul."""
        needs_a, needs_b = ctx.needs_input_grad[1:]
        # As autograd does: each only for the gradient of the other, so that a step may change it.
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.kinds = ((a.shape, a.dtype), (b.shape, b.dtype))
        ctx.transforms = transforms
        ctx.set_materialize_grads(False)
        return _no_view(torch.matmul(a, b))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of a and b."""
        if g is None:
            return None, None, None
        a, b = ctx.saved_tensors
        (shape_a, dtype_a), (shape_b, dtype_b) = ctx.kinds
        for_a, for_b = transformed_gradients(ctx, g, ("input", "other"), ctx.needs_input_grad[1:])
        grad_a = grad_b = None
        if for_a is not None:
            of_products = _of_products(for_a.g, shape_a, shape_b)
            grad_a = _left(of_products, b, shape_a).to(dtype_a)
        if for_b is not None:
            of_products = _of_products(for_b.g, shape_a, shape_b)
            grad_b = _right(of_products, a, shape_b).to(dtype_b)
        return None, grad_a, grad_b


def channels_of_rows(g: Tensor, in_rows: bool, total: Total | None) -> Channels:
    """What a linear layer tells T of the channels of its g."""
    return Channels(g.dim() - 1, in_rows, total, may_pad=True)


def _no_view(sigma: Tensor) -> Tensor:
    """The same memory, but no view: of a view no op in place is allowed behind a Function.

    Of tokens with a bias, torch's own product is one.
    """
    return alias_of(sigma) if sigma._is_view() else sigma


def rows(tensor: Tensor) -> Tensor:
    """(..., C) -> (rows, C)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _left(g: Tensor, b: Tensor, shape: torch.Size) -> Tensor:
    """The gradient g b^T of the left factor, of some shape, summed over what was broadcast."""
    b_matrix = (b if b.dim() > 1 else b.unsqueeze(-1)).to(g.dtype)
    if len(shape) == 2 and b_matrix.dim() > 2:  # one product instead of a batch of them and a sum
        columns = g.movedim(-2, 0).flatten(1)
        return columns @ b_matrix.movedim(-2, 0).flatten(1).t()
    return (g @ b_matrix.mT).sum_to_size(shape if len(shape) > 1 else (1, *shape)).reshape(shape)


def _right(g: Tensor, a: Tensor, shape: torch.Size) -> Tensor:
    """The gradient a^T g of the right factor, of some shape, summed over what was broadcast."""
    a_matrix = (a if a.dim() > 1 else a.unsqueeze(0)).to(g.dtype)
    if len(shape) <= 2:  # one product instead of a batch of them and a sum
        return (rows(a_matrix).t() @ rows(g)).reshape(shape)
    return (a_matrix.mT @ g).sum_to_size(shape)


def _of_products(g: Tensor, left: torch.Size, right: torch.Size) -> Tensor:
    """Give g the column and the row that it lacks where a factor was a vector."""
    if len(right) == 1:
        g = g.unsqueeze(-1)
    return g.unsqueeze(-2) if len(left) == 1 else g


PRODUCTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "linear": (Linear, LAYER),
    "matmul": (Matmul, ("input", "other")),
}
"""op -> its Function, and the names of its operands."""
