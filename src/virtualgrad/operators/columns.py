"""How the columns of g are shared by the programs of a kernel that adds them up over positions.

A column is a number of sigma, and has a channel; one channel has as many columns as there are
positions. A program that takes several blocks of columns with the same channels adds them up, and
leaves fewer sums to be added up behind it.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.launches import Launch, added_up


class Columns(NamedTuple):
    """How n columns are shared: each program takes some of its blocks, ``width`` apart."""

    programs: int
    width: int
    blocks: int


def split_columns(n: int, channels: int, columns: int, *, last: bool, most: int) -> Columns:
    """Share blocks of columns such that a program's have the same channels, in the same order.

    Args:
        n: how many columns there are.
        channels: of how many channels.
        columns: of one block.
        last: whether the channels of a position lie next to each other. If not, or where they fit
            into no number of blocks, a program takes one block.
        most: programs, about, that have something to do at once.
    """
    programs = -(-n // columns)
    together = channels // gcd(channels, columns)  # programs with columns of whole positions
    fewer = -(-most // together) * together
    if not last or fewer >= programs:
        return Columns(programs, n, 1)
    blocks = -(-programs // fewer)
    fewer = -(-programs // (blocks * together)) * together  # as many for each
    return Columns(fewer, fewer * columns, blocks)


class Addition:
    """Adds up sums of columns over positions: rows of a number for each channel are left.

    Args:
        like: a tensor on the device.
        shape: of the sums, (rows, width).
        channels: how many there are.
        last: whether those of a position lie next to each other.
    """

    def __init__(self, like: Tensor, shape: tuple[int, int], channels: int, *, last: bool) -> None:
        rows, width = shape
        self._channels = channels
        self._last = last
        self._shape = (rows, channels)
        self._launch: Launch | None = None
        if width > channels and may_add_by_kernel(width, channels, last=last):
            from virtualgrad.operators import sums_kernel  # noqa: PLC0415 - imports Triton

            grid, self._sizes, warps = launch_of_addition(rows, width, channels)
            self._launch = Launch(sums_kernel.add_positions, (*grid, 1), like, warps)

    def __call__(self, sums: Tensor) -> Tensor:
        """Return (rows, channels); the sums themselves if there is one position."""
        if self._launch is None:
            viewed, axis = by_positions(sums, self._channels, last=self._last)
            return sums if axis is None else added_up(viewed, axis)
        totals = torch.empty(self._shape, dtype=torch.float32, device=sums.device)
        self._launch((sums, totals), self._sizes)
        return totals


# Measured on an H200, on the layers of ResNet-50 and ResNet-20 (results/bench/tiles.txt).
MOST_POSITIONS = 2**14
TILE = (512, 8)  # positions and channels; 8 are 32 bytes, which memory hands over together
WARPS = 8


def may_add_by_kernel(width: int, channels: int, *, last: bool) -> bool:
    """Whether a kernel of ours is better than torch's sum: channels lie innermost, and are many."""
    return last and width // channels <= MOST_POSITIONS


def launch_of_addition(
    rows: int, width: int, channels: int
) -> tuple[tuple[int, int], tuple[int, ...], int]:
    """Grid, sizes and warps of the kernel's launch."""
    return (-(-channels // TILE[1]), rows), (width // channels, channels, *TILE), WARPS


def add_positions_by_torch(sums: Tensor, channels: int, *, last: bool) -> Tensor:
    """The same by torch: (rows, width) -> (rows, channels)."""
    viewed, axis = by_positions(sums, channels, last=last)
    return sums if axis is None else viewed.sum(axis)


def by_positions(sums: Tensor, channels: int, *, last: bool) -> tuple[Tensor, int | None]:
    """Sums of columns with an axis for positions, and which it is; None where there is but one."""
    rows, width = sums.shape
    if width == channels:
        return sums, None
    return (sums.view(rows, -1, channels), 1) if last else (sums.view(rows, channels, -1), 2)
