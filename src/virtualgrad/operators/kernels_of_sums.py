r"""Sums of g on a GPU by kernels of our own, where that applies; plain torch is their oracle.

**Batch norm** (:class:`NormSums`). With sigma = w x^ + b the gradients of w and b under T = f g are

    dJ/dw = sum over positions of f (sum over samples of g x^),    dJ/db = the same of g

and f hangs on sum of g^2 over samples (symbols as in :mod:`.kernels`). All three sums over samples
take one pass over g and x, and T(g) is not made. What is left, as large as one sample, torch sums.

**Shared positions** (:class:`Squares`): the root of the sum of g^2 over all axes but one, which
lies innermost (channels-last images, tokens). Rows are split over the chip, and a second launch
adds up the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.kernels import (
    DTYPES,
    Update,
    are_dense,
    fits,
    in_order_of,
    is_usable,
    power_of_two_from,
    processors_of,
)
from virtualgrad.operators.launches import Launch


class Normalized(NamedTuple):
    """How a batch norm makes x^ = (x - mean) deviation; the last two have a number per channel."""

    x: Tensor
    mean: Tensor
    deviation: Tensor


class NormSums:
    """The gradients of a batch norm's weight and bias, for one shape and strides of g and x."""

    def __init__(self, g: Tensor, x: Tensor) -> None:
        from virtualgrad.operators.sums_kernel import norm_sums  # noqa: PLC0415 - imports Triton

        m, self._channels = g.shape[0], g.shape[1]
        n = g.numel() // m
        self._last = self._channels == 1 or g.stride(1) == 1
        self._sizes = (m, n, g.stride(0), x.stride(0), self._channels)
        self._tile = tile_of_sums(n, g.element_size())
        grid = (-(-n // self._tile.columns), 1, 1)
        self._launch = Launch(norm_sums, grid, g, self._tile.warps)

    def __call__(
        self,
        g: Tensor,
        normalized: Normalized,
        r: Tensor,
        earlier: Tensor | None,
        update: Update,
    ) -> tuple[Tensor, Tensor]:
        """Return the two gradients, one row each, and the new norm of each column.

        Args:
            g: as it was when this was prepared.
            normalized: x (as it was then, too), mean and deviation.
            r: the running mean of g^2, laid out as one sample of g.
            earlier: the norm of the passes since the last commit, None if this is the first.
            update: the numbers of the factor; rho = 1 and weight = 0 for the r of before.
        """
        norm = torch.empty_like(r)
        n = self._sizes[1]
        sums = torch.empty(2, n, dtype=torch.float32, device=g.device)
        given = (g, *normalized, norm, in_order_of(norm, earlier), r, sums)
        numbers = tuple(map(float, update))
        tile = self._tile
        others = (*self._sizes, *numbers, self._last, tile.rows, tile.columns)
        before = earlier if earlier is None else earlier.dtype
        self._launch(given, others, (normalized.mean.dtype, before))
        return by_channel(sums, self._channels, last=self._last), norm


def by_channel(sums: Tensor, channels: int, *, last: bool) -> Tensor:
    """Sums of columns, added up over positions: two rows of a number for each channel."""
    if sums.shape[1] == channels:
        return sums
    return sums.view(2, -1, channels).sum(1) if last else sums.view(2, channels, -1).sum(2)


class SumsTile(NamedTuple):
    """What one program of a batch norm's sums reads at once, and by how many warps."""

    rows: int
    columns: int
    warps: int


# Measured on an H200, on the layers of ResNet-50 (results/bench/tiles.txt) and, in a step, of
# ResNet-20, whose g lie in the cache.
MANY_COLUMNS = 2**16
FEW_COLUMNS = 2**15
NUMBERS_OF_WARP = 1024
LONG = 256  # bytes of a row


def tile_of_sums(n: int, bytes_each: int) -> SumsTile:
    """The tile for n columns of numbers of some bytes: long rows where there are columns enough."""
    if n < FEW_COLUMNS:
        return SumsTile(64, 32, 4)
    rows, columns = (16, LONG // bytes_each) if n >= MANY_COLUMNS else (16 * bytes_each, 32)
    return SumsTile(rows, columns, max(1, rows * columns // NUMBERS_OF_WARP))


def prepare_norm(g: Tensor, x: Tensor, r: Tensor, averaged: tuple[int, ...]) -> NormSums | None:
    """The kernel for a g and an x of these shapes and strides; None where there is none.

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
    positions = g.numel() // (g.shape[0] * g.shape[1])
    innermost_or_outermost = g.shape[1] == 1 or g.stride(1) in (1, positions)
    return NormSums(g, x) if innermost_or_outermost else None


class Split(NamedTuple):
    """How the m rows of n columns are shared by programs: ``share`` rows for each of the parts."""

    parts: int
    share: int
    blocks: int  # of columns
    rows: int  # of a tile
    columns: int


# Measured on an H200 (results/bench/tiles.txt): 64 columns, and 8 programs of 4 warps for each
# multiprocessor, take a tenth to a third less than 128 columns and half as many of 8 warps.
NUMBERS_OF_TILE = 4096
WARPS = 4
PROGRAMS_EACH = 8
MOST_PARTS = 1024
NUMBERS_OF_LAST = 8192


def split_rows(m: int, n: int, processors: int) -> Split:
    """Share rows such that every processor has some programs."""
    columns = min(64, power_of_two_from(n))
    rows = NUMBERS_OF_TILE // columns
    blocks = -(-n // columns)
    parts = max(1, min(MOST_PARTS, PROGRAMS_EACH * processors // blocks))
    if type(m) is not int:  # a compiler's symbol: some parts may be empty
        return Split(parts, -(-m // (parts * rows)) * rows, blocks, rows, columns)
    share = -(-m // (min(parts, -(-m // rows)) * rows)) * rows
    return Split(-(-m // share), share, blocks, rows, columns)


class Squares:
    """The root of the sum of g^2 over all axes but the innermost one, for one shape of g."""

    def __init__(self, g: Tensor, axis: int) -> None:
        from virtualgrad.operators import sums_kernel  # noqa: PLC0415 - imports Triton

        n = g.shape[axis]
        m = g.numel() // n
        split = split_rows(m, n, processors_of(g.device))
        sizes = (m, n, split.share, split.rows, split.columns)
        grid = (split.parts, split.blocks, 1)
        self._first = Launch(sums_kernel.part_squares, grid, g, WARPS), sizes
        rows = power_of_two_from(split.parts)
        columns = min(32, NUMBERS_OF_LAST // rows)
        self._second = (
            Launch(sums_kernel.root_of_parts, (-(-n // columns), 1, 1), g, WARPS),
            (split.parts, n, rows, columns),
        )
        self._parts = (split.parts, n)

    def __call__(self, g: Tensor) -> Tensor:
        """Return the roots, one for each index of the axis."""
        parts = torch.empty(self._parts, dtype=torch.float32, device=g.device)
        norm = torch.empty(self._parts[1], dtype=torch.float32, device=g.device)
        (first, sizes), (second, last) = self._first, self._second
        first((g, parts), sizes)
        second((parts, norm), last)
        return norm


def prepare_squares(g: Tensor, axis: int) -> Squares | None:
    """The kernel for a g of this shape and strides, summed over all axes but one; None without."""
    if type(g) is not Tensor or g.dtype not in DTYPES or not _is_innermost(g, axis):
        return None
    if not is_usable(g.device):
        return None
    return Squares(g, axis)


def _is_innermost(g: Tensor, axis: int) -> bool:
    """Whether g is rows of the axis' numbers, one behind the other, each well aligned."""
    n = g.shape[axis]
    if n % 8 or not g.numel() // n or g.stride(axis) != 1:  # of 50,257 columns torch is faster
        return False
    return are_dense(g, [a for a in range(g.dim()) if a != axis and g.shape[a] > 1], n)
