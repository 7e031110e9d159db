r"""T of SVGD on the chip: one launch, one pass over g (written in Triton; imported when needed).

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
