"""Encapsulation 1 for batch norm: one forward, and the two halves of the backward by hand.

As in :mod:`.products`, the op runs once, as it is, and its backward is torch's own. The general way
would normalize twice, which is most of the time of a batch norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients
from virtualgrad.virtual.asked import Asked, is_wanted
from virtualgrad.virtual.ops import (
    LAYER,
    Transform,
    Transforms,
    as_dtype,
    asked_of,
    transformed_gradients,
)

_BACKWARD = torch.ops.aten._batch_norm_impl_index_backward.default
CHANNELS = Channels(1, rows=True)

BEHIND_INPUT: dict[str, Any] = {
    "weight": None,
    "bias": None,
    "running_mean": None,
    "running_var": None,
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}
"""What :class:`BatchNorm` takes behind the input, in order, with the defaults of F.batch_norm."""


def batch_norm_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What :class:`BatchNorm` takes behind the input; None for a call that torch refuses."""
    x, options = arguments["input"], {**BEHIND_INPUT, **arguments}
    if x.dim() < 2 or (options["training"] and x.numel() <= x.shape[1]):
        return None
    return tuple(options[name] for name in BEHIND_INPUT)


class BatchNorm(torch.autograd.Function):
    """sigma = w x^ + b, x^ the normalized x;  g to x,  T(g) to w and b."""

    @staticmethod
    def forward(  # noqa: PLR0917 - apply takes no keywords
        ctx: Any,
        transforms: Transforms,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Run the batch norm."""
        ctx.operands = operands_of(weight, bias)
        sigma, mean, deviation, reserve, kernel = torch._batch_norm_impl_index(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            training,
            momentum,
            eps,
            torch.backends.cudnn.enabled,
        )
        ctx.save_for_backward(x, weight, running_mean, running_var, mean, deviation, reserve)
        ctx.transforms, ctx.kernel, ctx.training, ctx.eps = transforms, kernel, training, eps
        ctx.set_materialize_grads(False)
        return sigma

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        if g is None:
            return (None,) * 9
        x, weight, running_mean, running_var, mean, deviation, reserve = ctx.saved_tensors
        if kernels.may_launch(g.device):
            made = _by_kernels(ctx, g, Norm(x, mean, deviation, weight))
            if made is not None:
                of_weight, of_bias = (as_dtype(one, weight.dtype) for one in made[:2])
                return None, made.input, of_weight, of_bias, None, None, None, None, None

        def backward(one: Tensor, mask: list[bool]) -> Any:
            return _BACKWARD(
                ctx.kernel,
                x,
                one,
                weight,
                running_mean,
                running_var,
                mean,
                deviation,
                ctx.training,
                ctx.eps,
                mask,
                reserve,
            )

        return None, *pulled_back(ctx, g, CHANNELS, backward), None, None, None, None, None


def operands_of(weight: Tensor | None, bias: Tensor | None) -> tuple[str, ...]:
    """The names of what a norm has: an input, and of a weight and a bias those that are given."""
    if weight is not None and bias is not None:
        return LAYER
    given = zip(LAYER[1:], (weight, bias), strict=True)
    return LAYER[0], *(name for name, tensor in given if tensor is not None)


def pulled_back(
    ctx: Any, g: Tensor, channels: Channels | None, backward: Callable[[Tensor, list[bool]], Any]
) -> list[Tensor | None]:
    """The gradients of a norm's input, weight and bias: of g, or of T(g), as each of them gets it.

    Args:
        ctx: of the norm's Function.
        g: dJ/dsigma.
        channels: the axis of g that is that of weight and bias, if there is just one.
        backward: of the norm: what is pulled back, and which of the three are wanted.
    """
    asked = _incoming(ctx, g, channels)
    result: list[Tensor | None] = [None, None, None]
    for one in {id(t.g): t.g for t in asked if t is not None}.values():
        mask = [t is not None and t.g is one for t in asked]
        found = backward(one, mask)
        for k, t in enumerate(asked):
            if t is not None and mask[k]:
                result[k] = t.scaled(found[k])
    return result


def laid_out_as(x: Tensor, g: Tensor) -> Tensor:
    """The numbers of each sample of g as those of x lie in memory, as a rule g itself.

    A g that comes from a mean over positions, say, lies otherwise than channels-last images.
    """
    if g.stride() == x.stride() or type(g) is not Tensor or type(x) is not Tensor:
        return g
    kept = [axis for axis in range(1, g.dim()) if g.shape[axis] > 1]
    if all(g.stride(axis) == x.stride(axis) for axis in kept):
        return g
    return torch.empty_like(x, dtype=g.dtype).copy_(g)


def _incoming(ctx: Any, g: Tensor, channels: Channels | None) -> list[Incoming | None]:
    """What input, weight and bias are to pull back, whichever of them there are."""
    needed = ctx.needs_input_grad[1:4]
    if ctx.operands is LAYER:
        return transformed_gradients(ctx, g, LAYER, needed, channels)
    is_needed = dict(zip(LAYER, needed, strict=True))
    pulled = transformed_gradients(
        ctx, g, ctx.operands, [is_needed[name] for name in ctx.operands], channels
    )
    incoming = dict(zip(ctx.operands, pulled, strict=True))
    return [incoming.get(name) for name in LAYER]


def _by_kernels(ctx: Any, g: Tensor, norm: Norm) -> NormGradients | None:
    """All gradients at once, weight's and bias' under their one T, where there are kernels."""
    transform = ctx.transforms.get("weight")
    if transform is None or ctx.transforms.get("bias") is not transform:
        return None
    if "input" in ctx.transforms:
        return None
    # Whatever else torch may have run (MIOpen, say) keeps other things.
    is_known = ctx.training and ctx.kernel in (0, 1) and not torch.is_grad_enabled()
    if not is_known or not all(ctx.needs_input_grad[2:4]):
        return None
    edges = ctx.next_functions
    if not (is_wanted(ctx, 1, edges) and is_wanted(ctx, 2, edges)):
        return None
    asked = asked_of(ctx, transform, [1, 2], edges)
    return gradients_by_kernels(transform, g, norm, ctx.needs_input_grad[1], asked)


def gradients_by_kernels(
    transform: Transform, g: Tensor, norm: Norm, needs_input: bool, asked: Asked | None = None
) -> NormGradients | None:
    """All gradients of a norm whose weight and bias are wanted, and have one T.

    None where there are no kernels for it; the input's where that is needed.
    """
    laid_out, into = laid_out_as(norm.x, g), None
    if needs_input:  # it may overwrite a copy that nobody is to see
        may_overwrite = laid_out is not g and asked is None and g.dtype == norm.x.dtype
        into = laid_out if may_overwrite else torch.empty_like(laid_out, dtype=norm.x.dtype)
    made: NormGradients | None = transform.norm_gradients(laid_out, norm, into=into, asked=asked)
    return made
