"""The statistic of shared positions on the chip (written in Triton; imported when needed).

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
    TIMES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """Sums of g^2 over ``share`` of m rows, for one block of n columns."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, m)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, share, TIMES * ROWS):
        for time in tl.static_range(TIMES):  # asked for before the first have come
            here = first + start + time * ROWS + tl.arange(0, ROWS)
            mask = (here < end)[:, None] & inside[None, :]
            y = tl.load((g + here.to(tl.int64) * n)[:, None] + columns[None, :], mask, other=0.0)
            wide = y.to(tl.float32)
            squares += wide * wide
    at = parts + tl.program_id(0).to(tl.int64) * n
    tl.store(at + columns, tl.sum(squares, axis=0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def root_of_parts(  # noqa: PLR0917 - as above
    parts, norm, count, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # pragma: no cover - as above
    """The root of the sum of ``count`` parts, for one block of n columns."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    rows = tl.arange(0, ROWS)
    mask = (rows < count)[:, None] & inside[None, :]
    y = tl.load((parts + rows * n)[:, None] + columns[None, :], mask, other=0.0)
    tl.store(norm + columns, tl.sqrt_rn(tl.sum(y, axis=0)), mask=inside)
