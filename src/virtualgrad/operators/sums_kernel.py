"""Sums over shared positions on the chip (written in Triton; imported when needed).

Symbols are those of :mod:`.rms_kernel`; as there, Triton reads the annotations.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m", "share"])
def part_squares(  # noqa: PLR0917 - Triton has no keywords here
    g,
    parts,
    m,
    n,
    share,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """Sums of g^2 over ``share`` of m rows, for one block of n columns; behind them all of g."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, m)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    plain = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, share, ROWS, num_stages=5):  # tiles that are on their way at once
        here = first + start + tl.arange(0, ROWS)
        mask = (here < end)[:, None] & inside[None, :]
        y = tl.load((g + here.to(tl.int64) * n)[:, None] + columns[None, :], mask, other=0.0)
        wide = y.to(tl.float32)
        squares += wide * wide
        if SUMS:
            plain += wide
    at = parts + tl.program_id(0).to(tl.int64) * n
    tl.store(at + columns, tl.sum(squares, axis=0), mask=inside)
    if SUMS:
        at += tl.num_programs(0).to(tl.int64) * n
        tl.store(at + columns, tl.sum(plain, axis=0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def root_of_parts(  # noqa: PLR0917 - as above
    parts, norm, total, count, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # pragma: no cover - as above
    """The root of the sum of ``count`` parts, for one block of n columns; and the sum of more."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    rows = tl.arange(0, ROWS)
    mask = (rows < count)[:, None] & inside[None, :]
    y = tl.load((parts + rows * n)[:, None] + columns[None, :], mask, other=0.0)
    tl.store(norm + columns, tl.sqrt_rn(tl.sum(y, axis=0)), mask=inside)
    if total is not None:
        parts += count.to(tl.int64) * n
        y = tl.load((parts + rows * n)[:, None] + columns[None, :], mask, other=0.0)
        tl.store(total + columns, tl.sum(y, axis=0), mask=inside)


@triton.jit(do_not_specialize=["positions"])
def add_positions(  # noqa: PLR0917 - as above
    sums,
    totals,  # (rows of sums, channels)
    positions,
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """Add up one row of sums of columns over the positions of some channels, the innermost."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = channel < channels
    of_row = sums + tl.program_id(1) * positions * channels
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, positions, ROWS):
        here = start + tl.arange(0, ROWS)
        at = here[:, None] * channels + channel[None, :]
        total += tl.load(of_row + at, (here < positions)[:, None] & inside[None, :], other=0.0)
    tl.store(totals + tl.program_id(1) * channels + channel, tl.sum(total, axis=0), mask=inside)
