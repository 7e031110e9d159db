r"""T of SVGD on the chip: one launch, one pass over g (written in Triton; imported when needed).

:func:`transform` makes T(g), :func:`norm_sums` what a batch norm's weight and bias get of it, and
:func:`part_squares` with :func:`root_of_parts` the statistic of shared positions. In the first two
g is read as m rows (samples) of n dense columns (the numbers of one sample). Per column

    q = q_before + sum over rows of g^2,                    N = sqrt(q)
    stale:            f is given
    r updated first:  f = s / sqrt(rho r + w q + eps),      w = (1 - rho) u^2 / e
    out = f g

A program owns COLUMNS columns and all rows of them, so that no two programs share a sum. It holds
its rows on the chip (WHOLE) where they fit: g comes from memory once though f is known only after
the last row. Where they do not fit it walks over them ROWS at a time, and with r updated first
walks back to write: the rows it read last are the likeliest to be still in the cache.

This file has no ``from __future__ import annotations``: Triton reads the annotations.
"""

import triton
import triton.language as tl


# m is a bound, never an offset: nothing is gained by a compilation for each kind of it, and the
# last batch of an epoch would cost one.
@triton.jit(do_not_specialize=["m"])
def transform(  # noqa: PLR0917 - keyword arguments cost time at every launch
    g,
    out,
    norm,
    earlier,  # N of earlier passes, or None
    given,  # f, or r with FIRST
    m,
    n,
    stride,  # from sample to sample in g; in out it is n
    rho,
    weight,
    scale,
    eps,
    FIRST: tl.constexpr,  # r is updated first
    WHOLE: tl.constexpr,  # ROWS >= m
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """One block of columns of the formulas above."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    rows = tl.arange(0, ROWS)
    f = tl.load(given + columns, mask=inside, other=0.0)  # asked for early, it is there in time
    if WHOLE:
        mask = (rows < m)[:, None] & inside[None, :]
        # 64-bit rows: m n may pass 2^31. Kept in g's dtype: half the registers of float32.
        x = tl.load((g + rows.to(tl.int64) * stride)[:, None] + columns[None, :], mask, other=0.0)
        squares = x.to(tl.float32) * x.to(tl.float32)
    else:
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, m, ROWS):
            here = start + rows
            mask = (here < m)[:, None] & inside[None, :]
            at = here.to(tl.int64)
            x = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0)
            wide = x.to(tl.float32)
            squares += wide * wide
            if not FIRST:
                y = (wide * f[None, :]).to(out.dtype.element_ty)
                tl.store((out + at * n)[:, None] + columns[None, :], y, mask)
    q = tl.sum(squares, axis=0)
    if earlier is not None:
        before = tl.load(earlier + columns, mask=inside, other=0.0)
        q += before * before
    tl.store(norm + columns, tl.sqrt_rn(q), mask=inside)
    if FIRST:
        f = scale * tl.rsqrt(rho * f + weight * q + eps)
    if WHOLE:
        y = (x.to(tl.float32) * f[None, :]).to(out.dtype.element_ty)
        tl.store((out + rows.to(tl.int64) * n)[:, None] + columns[None, :], y, mask)
    elif FIRST:
        last = (m - 1) // ROWS * ROWS
        for back in range(0, m, ROWS):
            here = last - back + rows
            mask = (here < m)[:, None] & inside[None, :]
            at = here.to(tl.int64)
            x = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0)
            y = (x.to(tl.float32) * f[None, :]).to(out.dtype.element_ty)
            tl.store((out + at * n)[:, None] + columns[None, :], y, mask)


@triton.jit(do_not_specialize=["m"])
def norm_sums(  # noqa: PLR0917 - as above
    g,
    x,
    mean,
    deviation,  # 1 / standard deviation; both of a channel
    norm,
    earlier,
    given,  # r
    sums,  # n for the weight, and behind them n for the bias
    m,
    n,
    stride,  # from sample to sample, in g
    stride_x,
    channels,
    rho,
    weight,
    scale,
    eps,
    LAST: tl.constexpr,  # channels lie innermost
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """For one block of columns: f * the sum of g x^, and f * the sum of g, in one pass over both.

    With x^ = (x - mean) deviation, and f as above: r updated first, or rho = 1 and weight = 0.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    channel = columns % channels if LAST else columns // (n // channels)
    center = tl.load(mean + channel, mask=inside, other=0.0)
    rows = tl.arange(0, ROWS)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    plain = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, m, ROWS):
        here = start + rows
        mask = (here < m)[:, None] & inside[None, :]
        at = here.to(tl.int64)
        y = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0).to(tl.float32)
        z = tl.load((x + at * stride_x)[:, None] + columns[None, :], mask, other=0.0)
        squares += y * y
        products += y * (z.to(tl.float32) - center[None, :])
        plain += y
    q = tl.sum(squares, axis=0)
    if earlier is not None:
        before = tl.load(earlier + columns, mask=inside, other=0.0)
        q += before * before
    tl.store(norm + columns, tl.sqrt_rn(q), mask=inside)
    r = tl.load(given + columns, mask=inside, other=0.0)
    f = scale * tl.rsqrt(rho * r + weight * q + eps)
    spread = tl.load(deviation + channel, mask=inside, other=0.0)
    tl.store(sums + columns, f * spread * tl.sum(products, axis=0), mask=inside)
    tl.store(sums + n + columns, f * tl.sum(plain, axis=0), mask=inside)


@triton.jit(do_not_specialize=["m", "share"])
def part_squares(  # noqa: PLR0917 - as above
    g, parts, m, n, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # pragma: no cover - as above
    """Sums of g^2 over ``share`` of m rows, for one block of n columns."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    first = tl.program_id(0) * share
    end = tl.minimum(first + share, m)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, share, ROWS):
        here = first + start + tl.arange(0, ROWS)
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
