"""What one program of T's kernel holds of g, and how programs share the columns.

g is m rows (samples) of n columns (the numbers of a sample), as in :mod:`.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from virtualgrad.operators.channels import Channels
from virtualgrad.operators.columns import Columns, split_columns


class Tile(NamedTuple):
    """What one program holds: all m rows of some columns (``whole``), or a part after the other."""

    rows: int
    columns: int
    warps: int
    whole: bool


class Summed(NamedTuple):
    """What is summed on the way: over all but the channels.

    Attributes:
        channels: how many there are.
        last: whether those of a position lie next to each other; if not, those of a channel do.
        of_product: whether it is T(g), and not g.
    """

    channels: int
    last: bool
    of_product: bool


# Measured on an H200 (8 to 128 rows, bfloat16 and float32): tiles of 8192 numbers with 64 of them
# a thread are best, and by a tenth to a third better than with 32 (results/bench/tiles.txt); 128 a
# thread spill.
NUMBERS_OF_TILE = 8192
NUMBERS_OF_WARP = 32 * 64
MOST_WHOLE = NUMBERS_OF_WARP * 16
SECTOR = 32  # bytes that memory hands over together
SHORT = 256  # bytes of a row: longer pieces of it come at full speed
# Where rows are walked over, three tiles on their way at once: on the layers of ViT-S/16 in
# bfloat16, with sums, they take a fifth less than larger tiles that are asked for one by one.
WALKED = Tile(16, 128, 1, False)
PROGRAMS_TO_WALK = 3  # of a multiprocessor, at least
# Where g is summed, too (on the layers of GPT-2 small), and all rows are held: half a tile, by half
# as many warps; and blocks of columns one after the other, where they are short.
PROGRAMS_EACH = 4  # of a multiprocessor
LONG = 128  # bytes of a column


def choose_tile(
    m: int, n: int, bytes_each: int, processors: int, *, known: bool, summed: bool = False
) -> Tile:
    """The tile for m rows and n columns of numbers of some bytes; ``summed``: see above.

    As a rule all rows of some columns, few enough of them to give every multiprocessor a program.
    They are walked over where they are too many to be held; and, if the factor is known, where they
    are so many that a tile would have only a short piece of each.
    """
    rows = power_of_two_from(m)
    sector = SECTOR // bytes_each
    columns = min(1024, max(NUMBERS_OF_TILE // rows, 2 * sector))
    is_short = columns * bytes_each <= SHORT
    if known and is_short and n >= PROGRAMS_TO_WALK * processors * WALKED.columns:
        return WALKED
    while columns > sector and n <= columns * (processors - 1):
        columns //= 2
    looped = Tile(NUMBERS_OF_TILE // columns, columns, 8, False)
    while columns > sector and rows * columns > MOST_WHOLE:
        columns //= 2
    if rows * columns > MOST_WHOLE:
        return looped
    if summed and columns >= 4 * sector:
        columns //= 2
    return Tile(rows, columns, max(1, rows * columns // NUMBERS_OF_WARP), True)


def share_columns(
    n: int, tile: Tile, summed: Summed | None, bytes_each: int, processors: int
) -> Columns:
    """How programs share n columns; without sums each has one block of them.

    So it is if columns are long: then there are few sums, and nothing is gained by fewer.
    """
    if summed is None or tile.rows * bytes_each >= LONG or not tile.whole:
        return Columns(-(-n // tile.columns), n, 1)
    most = PROGRAMS_EACH * processors
    return split_columns(n, summed.channels, tile.columns, last=summed.last, most=most)


def half_as_wide(tile: Tile) -> Tile:
    """The tile where rows of T(g) are longer: numbers of g begin anywhere, and come one by one."""
    return tile._replace(columns=tile.columns // 2)


def share_rows(n: int, tile: Tile, channels: int) -> Columns:
    """How programs share n columns if each is to have columns of one row of channels alone."""
    return Columns(n // channels * -(-channels // tile.columns), n, 1)


def sums_of(g: Tensor, axis: int, channels: Channels) -> Summed | None:
    """What a layer wants to be summed, if its channels lie innermost or outermost in a sample."""
    if channels.total is None or channels.axis == axis:
        return None
    count = g.shape[channels.axis]
    positions = g.numel() // (g.shape[axis] * count)
    last = count == 1 or positions == 1 or g.stride(channels.axis) == 1
    if not last and g.stride(channels.axis) != positions:
        return None
    return Summed(count, last, channels.total == "T(g)")


def power_of_two_from(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
