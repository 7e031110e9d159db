"""Encapsulation 1 for layer norm: one forward, and the two halves of the backward by hand.

As in :mod:`.norms`, the op runs once, as it is, and its backward is torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.channels import Channels
from virtualgrad.virtual.norms import operands_of, pulled_back
from virtualgrad.virtual.ops import CAST_BY_AUTOCAST, Transforms, as_dtype

_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


def layer_norm_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What :class:`LayerNorm` takes behind the input; None for a call without a plain shape."""
    shape = arguments.get("normalized_shape")
    if not isinstance(shape, list | tuple) or arguments["input"].numel() == 0:
        return None
    weight, bias = arguments.get("weight"), arguments.get("bias")
    return weight, bias, tuple(shape), arguments.get("eps", 1e-5)


class LayerNorm(torch.autograd.Function):
    """sigma = w x^ + b, x^ the normalized x;  g to x,  T(g) to w and b."""

    @staticmethod
    def forward(  # noqa: PLR0917 - apply takes no keywords
        ctx: Any,
        transforms: Transforms,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
    ) -> Tensor:
        """Run the layer norm."""
        ctx.operands = operands_of(weight, bias)
        ctx.dtypes = [None if one is None else one.dtype for one in (x, weight, bias)]
        if _is_cast_by_autocast(x):
            x = _in_float32(x)
            weight = None if weight is None else _in_float32(weight)
            bias = None if bias is None else _in_float32(bias)
        sigma, mean, deviation = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        ctx.transforms, ctx.shape = transforms, shape
        ctx.set_materialize_grads(False)
        return sigma

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        if g is None:
            return (None,) * 6
        x, weight, bias, mean, deviation = ctx.saved_tensors

        def backward(one: Tensor, mask: list[bool]) -> Any:
            return _BACKWARD(one, x, ctx.shape, mean, deviation, weight, bias, mask)

        found = pulled_back(ctx, g, channels_behind(g, ctx.shape), backward)
        gradients = [
            None if one is None else as_dtype(one, dtype)
            for one, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return None, *gradients, None, None


def channels_behind(g: Tensor, shape: tuple[int, ...]) -> Channels | None:
    """What a layer norm over axes of some shape tells T of the channels of its g."""
    return Channels(g.dim() - 1, rows=True) if len(shape) == 1 else None


def _is_cast_by_autocast(x: Tensor) -> bool:
    """Whether autocast runs a layer norm in float32 now: on a CPU it leaves it as it is."""
    if not torch._C._is_any_autocast_enabled():  # in most passes, and quickly asked
        return False
    kind = x.device.type
    return kind != "meta" and _has_rule(kind) and torch.is_autocast_enabled(kind)


@cache
def _has_rule(kind: str) -> bool:
    """Whether autocast knows layer norms on a kind of device."""
    key = f"Autocast{kind.upper()}"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::layer_norm", key))


def _in_float32(tensor: Tensor) -> Tensor:
    return as_dtype(tensor, torch.float32) if tensor.dtype in CAST_BY_AUTOCAST else tensor
