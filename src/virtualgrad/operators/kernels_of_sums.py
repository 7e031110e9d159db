r"""Sums of g^2 and g over shared positions on a GPU, where that applies; plain torch the oracle.

The root of the sum of g^2 over all axes but one, which lies innermost (channels-last images,
tokens), and the sum of g for a bias that wants it. Rows are split over the chip, and a second
launch adds up the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.kernels import (
    DTYPES,
    are_dense,
    is_usable,
    processors_of,
)
from virtualgrad.operators.launches import Launch
from virtualgrad.operators.tiles import power_of_two_from


class Split(NamedTuple):
    """How the m rows of n columns are shared by programs: ``share`` rows for each of the parts."""

    parts: int
    share: int
    blocks: int  # of columns
    rows: int  # of a tile
    columns: int


# Measured on an H200 (results/bench/tiles.txt): programs of one warp with five tiles on their way
# take 4 to 24 % less in bfloat16, and 1 to 16 in float32, than twice as many that ask for four
# smaller ones at once and wait for them.
NUMBERS_OF_TILE = 1024
WARPS = 1
PROGRAMS_EACH = 8
MOST_PARTS = 1024
NUMBERS_OF_LAST = 8192
WARPS_OF_LAST = 4


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
    """The root of the sum of g^2 over all axes but the innermost one, for one shape of g.

    And the sum of g, if ``is_summed``.
    """

    def __init__(self, g: Tensor, axis: int, *, is_summed: bool = False) -> None:
        from virtualgrad.operators import sums_kernel  # noqa: PLC0415 - imports Triton

        n = g.shape[axis]
        m = g.numel() // n
        split = split_rows(m, n, processors_of(g.device))
        sizes = (m, n, split.share, split.rows, split.columns, is_summed)
        grid = (split.parts, split.blocks, 1)
        self._first = Launch(sums_kernel.part_squares, grid, g, WARPS), sizes
        rows = power_of_two_from(split.parts)
        columns = min(32, NUMBERS_OF_LAST // rows)
        self._second = (
            Launch(sums_kernel.root_of_parts, (-(-n // columns), 1, 1), g, WARPS_OF_LAST),
            (split.parts, n, rows, columns),
        )
        self._parts = (2, split.parts, n) if is_summed else (1, split.parts, n)
        self.is_summed = is_summed

    def __call__(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the roots, one for each index of the axis, and the sums."""
        parts = torch.empty(*self._parts, dtype=torch.float32, device=g.device)
        norm = torch.empty(self._parts[2], dtype=torch.float32, device=g.device)
        total = torch.empty_like(norm) if self.is_summed else None
        (first, sizes), (second, last) = self._first, self._second
        first((g, parts), sizes, None, (g,))
        second((parts, norm, total), last, None, ())  # all of them new
        return norm, total


def prepare_squares(g: Tensor, axis: int, is_summed: bool = False) -> Squares | None:
    """The kernel for a g of this shape and strides, summed over all axes but one; None without."""
    if type(g) is not Tensor or g.dtype not in DTYPES or not _is_innermost(g, axis):
        return None
    if not is_usable(g.device):
        return None
    return Squares(g, axis, is_summed=is_summed)


def _is_innermost(g: Tensor, axis: int) -> bool:
    """Whether g is rows of the axis' numbers, one behind the other, each well aligned."""
    n = g.shape[axis]
    if n % 8 or not g.numel() // n or g.stride(axis) != 1:  # of 50,257 columns torch is faster
        return False
    return are_dense(g, [a for a in range(g.dim()) if a != axis and g.shape[a] > 1], n)
