r"""The backward pass of a batch norm under T, by kernels of our own; plain torch is their oracle.

With sigma = w x^ + b and x^ = (x - mean) d, the gradients of w and b under T = f g are

    dJ/dw = sum over positions of f (sum over samples of g x^),    dJ/db = the same of g

f hangs on the sum of g^2 over samples (symbols as in :mod:`.kernels`), and the input gets

    dJ/dx = w d (g - mean of g - x^ * mean of g x^)

with means over samples and positions, and the true g. All five sums take one pass over g and x, as
torch's own backward needs for its two, and T(g) is not made. A second pass makes dJ/dx.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.columns import Addition, split_columns
from virtualgrad.operators.kernels import (
    DTYPES,
    Update,
    fits,
    in_order_of,
    is_usable,
    processors_of,
)
from virtualgrad.operators.launches import Launch
from virtualgrad.operators.tiles import power_of_two_from


class Norm(NamedTuple):
    """A batch norm in training: w x^ + b, with x^ = (x - mean) deviation.

    Attributes:
        x: its input.
        mean, deviation: of each channel; the latter is 1 / the standard deviation.
        weight: w.
    """

    x: Tensor
    mean: Tensor
    deviation: Tensor
    weight: Tensor


class NormGradients(NamedTuple):
    """What the backward pass of a batch norm returns; the input's where it was asked for."""

    weight: Tensor
    bias: Tensor
    input: Tensor | None


def pull_back(g: Tensor, norm: Norm, of_product: Tensor, of_g: Tensor) -> Tensor:
    """dJ/dx, by the formula above, of the sums of g x^ and of g."""
    x, *of_channels = norm
    channel = (1, -1, *([1] * (g.dim() - 2)))
    count = g.numel() // g.shape[1]
    mean, deviation, weight = (one.view(channel) for one in of_channels)
    level, slope = of_g.view(channel) / count, deviation * of_product.view(channel) / count
    pulled = weight * deviation * (g.to(mean.dtype) - level - slope * (x.to(mean.dtype) - mean))
    return pulled.to(x.dtype)


class NormBackward:
    """The backward pass of a batch norm, for one shape and strides of g and x."""

    def __init__(self, g: Tensor, x: Tensor) -> None:
        from virtualgrad.operators import norm_kernel  # noqa: PLC0415 - imports Triton

        m, self._channels = g.shape[0], g.shape[1]
        n = g.numel() // m
        self._last = self._channels == 1 or g.stride(1) == 1
        self._is_whole = n == self._channels  # a channel is one column: no second launch
        sizes = (m, n, g.stride(0), x.stride(0), self._channels)
        tile = tile_of_sums(n)
        programs, width, blocks = split_columns(
            n, self._channels, tile.columns, last=self._last, most=MOST_PROGRAMS
        )
        self._sums = (4, width)
        self._sizes = (*sizes, width, blocks)
        self._meta = (self._last, *tile)
        self._launch = Launch(norm_kernel.norm_sums, (programs, 1, 1), g, WARPS_OF_SUMS)
        self._added_up = Addition(g, self._sums, self._channels, last=self._last)
        rows, columns = tile_of_input(n)
        blocks = -(-n // columns)
        grid = (blocks * -(-m // rows), 1, 1)
        self._launch_input = Launch(norm_kernel.norm_input, grid, g, WARPS_OF_INPUT)
        self._others_of_input = (*sizes, blocks, self._last, rows, columns)

    def __call__(  # noqa: PLR0917 - called once for every layer
        self,
        g: Tensor,
        norm: Norm,
        r: Tensor,
        earlier: Tensor | None,
        update: Update,
        into: Tensor | None,
    ) -> tuple[NormGradients, Tensor]:
        """Return the gradients, and the new root of the sum of g^2 of each column.

        Args:
            g: as it was when this was prepared.
            norm: its x as it was then, too.
            r: the running mean of g^2, laid out as one sample of g.
            earlier: the root for the passes since the last commit, None if this is the first.
            update: the numbers of the factor; rho = 1 and weight = 0 for the r of before.
            into: where dJ/dx is to be written, laid out as g, or g itself; None if not asked for.
        """
        x, mean, deviation, weight = norm
        weight = weight.contiguous()  # it may be a view of a parameter
        root = torch.empty_like(r)
        sums = torch.empty(self._sums, dtype=torch.float32, device=g.device)
        out = into if self._is_whole else None
        given = (g, x, mean, deviation, root, in_order_of(root, earlier), r, sums, weight, out)
        others = (*self._sizes, *map(float, update), *self._meta)
        before = earlier if earlier is None else earlier.dtype
        self._launch(given, others, (mean.dtype, before, weight.dtype, out is None))
        totals = self._added_up(sums)
        if into is not None and out is None:
            tensors = (g, x, mean, deviation, weight, totals, into)
            self._launch_input(tensors, self._others_of_input, (mean.dtype, weight.dtype))
        return NormGradients(totals[2], totals[3], into), root


class SumsTile(NamedTuple):
    """What one program of a batch norm's sums, of one warp, reads at once."""

    rows: int
    columns: int


# Measured on an H200, on the layers of ResNet-50 and ResNet-20 (results/bench/tiles.txt).
MANY_COLUMNS = 2**15
MOST_PROGRAMS = 2112
MOST_ROWS = 1024
WARPS_OF_SUMS = 1
WARPS_OF_INPUT = 4
NUMBERS_OF_INPUT = 2048


def tile_of_sums(n: int) -> SumsTile:
    """The tile for n columns: more of them at once where there are enough for all processors."""
    return SumsTile(8, 64) if n >= MANY_COLUMNS else SumsTile(16, 32)


def tile_of_input(n: int) -> tuple[int, int]:
    """Rows and columns of the tile for dJ/dx."""
    columns = min(256, max(32, power_of_two_from(n)))
    return NUMBERS_OF_INPUT // columns, columns


def prepare_norm(g: Tensor, x: Tensor, r: Tensor, averaged: tuple[int, ...]) -> NormBackward | None:
    """The kernels for a g and an x of these shapes and strides; None where there are none.

    Args:
        g: with samples on axis 0 and channels on axis 1.
        x: the input of the norm.
        r: the running mean beside g.
        averaged: the axes over which g^2 is averaged.
    """
    if averaged != (0,) or type(x) is not Tensor or x.dtype not in DTYPES or x.shape != g.shape:
        return None
    if not fits(g, r, 0) or not is_usable(g.device):
        return None
    kept = [axis for axis in range(1, g.dim()) if g.shape[axis] > 1]
    if [x.stride(axis) for axis in kept] != [g.stride(axis) for axis in kept]:
        return None
    m, positions = g.shape[0], g.numel() // (g.shape[0] * g.shape[1])
    if g.shape[1] > 1 and g.stride(1) not in (1, positions):
        return None
    n = g.shape[1] * positions
    if m > MOST_ROWS and n < tile_of_sums(n).columns * processors_of(g.device):
        return None  # long columns, and few
    return NormBackward(g, x)
