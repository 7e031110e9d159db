r"""T of SVGD on the chip: one launch, one pass over g (written in Triton; imported when needed).

g is read as m rows (samples) of n dense columns (the numbers of one sample). Per column

    q = q_before + sum over rows of g^2,                    N = sqrt(q)
    r of before:      f = s / sqrt(r + eps)                                           (KNOWN)
    r updated first:  f = s / sqrt(rho r + w q + eps),      w = (1 - rho) u^2 / e
    out = f g
    sums = the sum over rows of f g (OF_PRODUCT) or of g, where they are asked for: for a bias

A program owns COLUMNS columns and all rows of them, so that no two programs share a sum. It holds
its rows on the chip (WHOLE), so that g comes from memory once though f may be known only after the
last row; or it walks over them ROWS at a time. Then it writes on the way if f is KNOWN, and if not
walks back to write: the rows it read last are the likeliest to be still in the cache.

Rows of CHANNELS numbers may lie PITCH apart in ``out``: a product reads them faster then. A program
has columns of one row there, so that what it writes lies together. Without that both are 1.

Of tiles that are small enough three are on their way at once; they lie in shared memory until they
are read, and larger ones would not fit there.

For sums it takes one block of columns after the other, ``width`` apart, which is a multiple of the
channels where there are several: a column of the program is one channel, and is summed on the chip.

:func:`transform` is for eager passes, which leave N and count on the host; compiled ones write the
new r (:mod:`.candidate_kernel`).

This file has no ``from __future__ import annotations``: Triton reads the annotations.
"""

import triton
import triton.language as tl


@triton.jit
def first_columns(
    n, CHANNELS: tl.constexpr, PITCH: tl.constexpr, COLUMNS: tl.constexpr
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """The first columns of a program, and where they lie in a sample of out; n: none."""
    block = tl.program_id(0)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    into = columns
    if CHANNELS != PITCH:
        in_row: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
        channels = block % in_row * COLUMNS + tl.arange(0, COLUMNS)
        columns = tl.where(channels < CHANNELS, block // in_row * CHANNELS + channels, n)
        into = block // in_row * PITCH + channels
    return columns, into


@triton.jit
def read_rows(  # noqa: PLR0917 - Triton has no keywords here
    g,
    out,
    f,
    columns,
    into,
    m,
    n,
    stride,
    apart,
    SUMS: tl.constexpr,
    KNOWN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The rows, if they stay on the chip; the sums of their squares and, if SUMS, of themselves.

    If they do not stay, f of them is written, where it is KNOWN. Samples are ``apart`` in out.
    """
    inside = columns < n
    rows = tl.arange(0, ROWS)
    if WHOLE:
        mask = (rows < m)[:, None] & inside[None, :]
        # 64-bit rows: m n may pass 2^31. Kept in g's dtype: half the registers of float32.
        x = tl.load((g + rows.to(tl.int64) * stride)[:, None] + columns[None, :], mask, other=0.0)
        squares = x.to(tl.float32) * x.to(tl.float32)
        plain = x.to(tl.float32)
    else:
        x = 0
        squares = tl.zeros([ROWS, COLUMNS], tl.float32)
        plain = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, m, ROWS, num_stages=3 if ROWS * COLUMNS <= 4096 else 1):
            here = start + rows
            mask = (here < m)[:, None] & inside[None, :]
            at = here.to(tl.int64)
            y = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0)
            wide = y.to(tl.float32)
            squares += wide * wide
            if SUMS:
                plain += wide
            if KNOWN:
                y = (wide * f[None, :]).to(out.dtype.element_ty)
                tl.store((out + at * apart)[:, None] + into[None, :], y, mask)
    return x, tl.sum(squares, axis=0), tl.sum(plain, axis=0)  # what is not used is not made


@triton.jit
def write_rows(  # noqa: PLR0917 - as above
    x,
    g,
    out,
    f,
    columns,
    into,
    m,
    n,
    stride,
    apart,
    KNOWN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):  # pragma: no cover - as above
    """Write f times the rows, unless that was done on the way."""
    inside = columns < n
    rows = tl.arange(0, ROWS)
    if WHOLE:
        mask = (rows < m)[:, None] & inside[None, :]
        y = (x.to(tl.float32) * f[None, :]).to(out.dtype.element_ty)
        tl.store((out + rows.to(tl.int64) * apart)[:, None] + into[None, :], y, mask)
    elif not KNOWN:
        last = (m - 1) // ROWS * ROWS
        for back in range(0, m, ROWS):
            here = last - back + rows
            mask = (here < m)[:, None] & inside[None, :]
            at = here.to(tl.int64)
            y = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0)
            y = (y.to(tl.float32) * f[None, :]).to(out.dtype.element_ty)
            tl.store((out + at * apart)[:, None] + into[None, :], y, mask)


@triton.jit
def _transform_block(  # noqa: PLR0917 - as above
    g,
    out,
    norm,
    earlier,
    given,
    columns,
    into,
    m,
    n,
    stride,
    apart,
    rho,
    weight,
    scale,
    eps,
    SUMS: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    KNOWN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """One block of columns of the formulas above; its sums."""
    inside = columns < n
    r = tl.load(given + columns, mask=inside, other=0.0)  # asked for early, it is there in time
    f = scale * tl.rsqrt(r + eps)
    x, q, plain = read_rows(
        g, out, f, columns, into, m, n, stride, apart, SUMS, KNOWN, WHOLE, ROWS, COLUMNS
    )
    if earlier is not None:
        before = tl.load(earlier + columns, mask=inside, other=0.0)
        q += before * before
    tl.store(norm + columns, tl.sqrt_rn(q), mask=inside)
    if not KNOWN:
        f = scale * tl.rsqrt(rho * r + weight * q + eps)
    write_rows(x, g, out, f, columns, into, m, n, stride, apart, KNOWN, WHOLE, ROWS)
    return tl.where(inside, f, 0.0) * plain if OF_PRODUCT else plain


# m is a bound, never an offset: nothing is gained by a compilation for each kind of it, and the
# last batch of an epoch would cost one.
@triton.jit(do_not_specialize=["m", "blocks"])
def transform(  # noqa: PLR0917 - keyword arguments cost time at every launch
    g,
    out,
    norm,
    earlier,  # N of earlier passes, or None
    given,  # r
    sums,  # or None
    m,
    n,
    stride,  # from sample to sample in g
    width,
    blocks,
    rho,
    weight,
    scale,
    eps,
    KNOWN: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PITCH: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The formulas above, for one block of columns, or for several if there are sums."""
    first, into = first_columns(n, CHANNELS, PITCH, COLUMNS)
    apart = n // CHANNELS * PITCH  # from sample to sample in out
    if sums is None:  # no loop of one: it is the kernel whose tiles were measured
        _transform_block(
            g,
            out,
            norm,
            earlier,
            given,
            first,
            into,
            m,
            n,
            stride,
            apart,
            rho,
            weight,
            scale,
            eps,
            False,
            OF_PRODUCT,
            KNOWN,
            WHOLE,
            ROWS,
            COLUMNS,
        )
    else:
        total = tl.zeros([COLUMNS], tl.float32)
        for block in tl.range(0, blocks, num_stages=3 if ROWS * COLUMNS <= 4096 else 1):
            total += _transform_block(
                g,
                out,
                norm,
                earlier,
                given,
                first + block * width,
                first + block * width,
                m,
                n,
                stride,
                n,
                rho,
                weight,
                scale,
                eps,
                True,
                OF_PRODUCT,
                KNOWN,
                WHOLE,
                ROWS,
                COLUMNS,
            )
        tl.store(sums + first, total, mask=first < width)
