"""Encapsulation 1, norms whose node is one of C++: what such a node asks of Python.

As in :mod:`.native_layers`: T(g), or all gradients by kernels, in the plainest pass of all, and
everything in any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.channels import Incoming
from virtualgrad.operators.kernels_of_norms import Norm
from virtualgrad.operators.native_transform import for_layer, for_norm
from virtualgrad.virtual.layer_norms import LayerNorm, channels_behind
from virtualgrad.virtual.native_contexts import Gradients, Run, context
from virtualgrad.virtual.norms import (
    CHANNELS,
    BatchNorm,
    gradients_by_kernels,
    laid_out_as,
    operands_of,
)
from virtualgrad.virtual.ops import Transform, Transforms


def native_batch_norm(library: ModuleType, others: tuple[Any, ...], python: Run) -> Run | None:
    """A batch norm with a node of C++; None for options about which torch has something to say."""
    weight, bias, running_mean, running_var, training, momentum, eps = others
    if type(training) is not bool or not _are_numbers(momentum, eps):
        return None
    operands = operands_of(weight, bias)

    def by_python(
        saved: Any, needed: Any, transforms: Transforms, g: Tensor, kernel: int
    ) -> Gradients:
        ctx = context(saved, (False, *needed), transforms)
        ctx.operands, ctx.kernel, ctx.training, ctx.eps = operands, kernel, training, eps
        return BatchNorm.backward(ctx, g)[1:4]

    run: Run = library.BatchNorm(
        *(weight, bias, python, _of_batch_norm, by_python),
        *(running_mean, running_var, training, momentum, eps),
    )
    return run


def _of_batch_norm(
    transform: Transform, g: Tensor, for_kernels: Sequence[Tensor], wanted: str | None
) -> Incoming:
    """What weight and bias are to pull back; all gradients, where there are kernels for them.

    Those of weight and bias stand in ``weight`` and ``total`` then, and the input's in ``g``.
    """
    if not for_kernels or not kernels.may_launch(g.device):
        return for_layer(transform, g, CHANNELS, wanted)
    norm = Norm(*for_kernels)

    def make() -> tuple[Incoming, Tensor]:
        laid_out = laid_out_as(norm.x, g)
        made = gradients_by_kernels(transform, laid_out, norm, wanted == "all")
        if made is None:
            return transform.for_layer(g, CHANNELS), g
        of_x = g if made.input is None else made.input
        return Incoming(of_x, None, made.bias, made.weight), laid_out

    return for_norm(transform, g, norm, wanted, make)


def native_layer_norm(library: ModuleType, others: tuple[Any, ...], python: Run) -> Run | None:
    """A layer norm with a node of C++; None for options about which torch has something to say."""
    weight, bias, shape, eps = others
    if not _are_numbers(*shape, eps):
        return None
    operands = operands_of(weight, bias)

    def by_python(
        saved: Any, needed: Any, transforms: Transforms, g: Tensor, dtypes: Any
    ) -> Gradients:
        ctx = context(saved, (False, *needed), transforms)
        ctx.operands, ctx.dtypes, ctx.shape = operands, dtypes, shape
        return LayerNorm.backward(ctx, g)[1:4]

    run: Run = library.LayerNorm(weight, bias, python, _of_layer_norm(shape), by_python, shape, eps)
    return run


def _of_layer_norm(shape: tuple[int, ...]) -> Callable[[Transform, Tensor], Incoming]:
    return lambda transform, g: for_layer(transform, g, channels_behind(g, shape))


def _are_numbers(*options: Any) -> bool:
    return all(type(option) in {int, float} for option in options)
