"""The weight gradient of a convolution under T as one op of a compiled pass.

A compiler that makes T(g) writes it beside g, for cuDNN to read; this op reads g itself
(:mod:`.kernels_of_weights`). What it sees of g for the next r it returns, as sums of g^2 over parts
of the samples. Plain torch is its oracle there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators.channels import Convolved, Window
from virtualgrad.operators.kernels_of_weights import Plan, may_multiply, plan_for
from virtualgrad.operators.launches import OpLaunch


@settled_while_tracing
def is_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the op can be used for a g; asked while a pass is traced."""
    return device.type == "cuda" and may_multiply(device, dtype) and bool(_op())


def weight_gradient(
    g: Tensor,
    convolved: Convolved,
    r: Tensor | None,
    numbers: Tensor | None,
    *,
    with_squares: bool,
) -> tuple[Tensor, Tensor]:
    """Return dJ/dW under T, and sums of g^2 over parts of the samples, if they are wanted.

    Args:
        g: dJ/dsigma, of images.
        convolved: what sigma was made of.
        r: by which T goes; None where it only sees g.
        numbers: s, rho, eps and the loss's factor, on the device, beside r.
        with_squares: whether the sums are wanted.
    """
    x, kernel, window = convolved
    made: tuple[Tensor, Tensor] = torch.ops.virtualgrad.weight_gradient(
        g, x, r, numbers, [*kernel], *map(list, window), with_squares
    )
    return made


class Launches(NamedTuple):
    """The launches that make a weight gradient, and what they make, as yet empty.

    Attributes:
        product: of ``weight_parts``.
        addition: of ``add_parts``, behind it.
        weight: dJ/dW, as large as the weight, channels-last.
        squares: sums of g^2, (splits, channels, height, width), if they were asked for.
    """

    product: OpLaunch
    addition: OpLaunch
    weight: Tensor
    squares: Tensor | None


def launches_of_weight(
    g: Tensor,
    convolved: Convolved,
    r: Tensor | None,
    numbers: Tensor | None,
    *,
    with_squares: bool,
) -> Launches:
    """The launches for a g and an x of images; arguments as above."""
    order = torch.channels_last
    g, x = g.contiguous(memory_format=order), convolved.x.contiguous(memory_format=order)
    plan: Plan = plan_for(g, convolved._replace(x=x))
    if r is not None:
        r = r.permute(1, 2, 0).contiguous()  # as a rule itself

    def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=g.device)

    parts, weight = empty(plan.parts), empty(plan.weight, g.dtype)
    squares = empty(plan.squares) if with_squares else None
    tensors = (g, x, r, numbers, parts, squares, None)
    product = (*tensors, *plan.sizes, 1.0, 0.0, False, *plan.meta)
    blocks = plan.programs_of_addition
    addition = (parts, weight, None, None, None, plan.parts[0], plan.columns, blocks, 0, 0)
    return Launches(
        OpLaunch((plan.programs,), product, plan.warps),
        OpLaunch((blocks,), (*addition, *plan.tile_of_parts, 16), 4),
        weight.permute(0, 3, 1, 2),
        None if squares is None else squares.permute(0, 3, 1, 2),
    )


@cache
def _op() -> Any:
    """Register the op, once; a compiler that sees into it finds two kernels."""
    from torch.library import triton_op, wrap_triton  # noqa: PLC0415 - with Triton alone

    from virtualgrad.operators import weight_kernel  # noqa: PLC0415 - imports Triton

    @triton_op("virtualgrad::weight_gradient", mutates_args=())
    def weight_gradient(  # noqa: PLR0917 - an op has no tuples
        g: Tensor,
        x: Tensor,
        r: Tensor | None,
        numbers: Tensor | None,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        with_squares: bool,
    ) -> tuple[Tensor, Tensor]:
        pairs = [(one[0], one[1]) for one in (kernel, stride, padding, dilation)]
        convolved = Convolved(x, pairs[0], Window(*pairs[1:]))
        launches = launches_of_weight(g, convolved, r, numbers, with_squares=with_squares)
        for function, (grid, arguments, warps) in (
            (weight_kernel.weight_parts, launches.product),
            (weight_kernel.add_parts, launches.addition),
        ):
            wrap_triton(function)[grid](*arguments, num_warps=warps)
        squares = launches.squares
        return launches.weight, torch.empty(0, device=g.device) if squares is None else squares

    return weight_gradient
