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

For sums it takes one block of columns after the other, ``width`` apart, which is a multiple of the
channels where there are several: a column of the program is one channel, and is summed on the chip.

:func:`transform` is for eager passes, which leave N and count on the host;
:func:`transform_and_write` for compiled ones, which write the new r.

This file has no ``from __future__ import annotations``: Triton reads the annotations.
"""

import triton
import triton.language as tl


@triton.jit
def _read_rows(  # noqa: PLR0917 - Triton has no keywords here
    g,
    out,
    f,
    columns,
    m,
    n,
    stride,
    SUMS: tl.constexpr,
    KNOWN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """The rows, if they stay on the chip; the sums of their squares and, if SUMS, of themselves.

    If they do not stay, f of them is written, where it is KNOWN.
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
        for start in range(0, m, ROWS):
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
                tl.store((out + at * n)[:, None] + columns[None, :], y, mask)
    return x, tl.sum(squares, axis=0), tl.sum(plain, axis=0)  # what is not used is not made


@triton.jit
def _write_rows(  # noqa: PLR0917 - as above
    x,
    g,
    out,
    f,
    columns,
    m,
    n,
    stride,
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
        tl.store((out + rows.to(tl.int64) * n)[:, None] + columns[None, :], y, mask)
    elif not KNOWN:
        last = (m - 1) // ROWS * ROWS
        for back in range(0, m, ROWS):
            here = last - back + rows
            mask = (here < m)[:, None] & inside[None, :]
            at = here.to(tl.int64)
            y = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0)
            y = (y.to(tl.float32) * f[None, :]).to(out.dtype.element_ty)
            tl.store((out + at * n)[:, None] + columns[None, :], y, mask)


@triton.jit
def _transform_block(  # noqa: PLR0917 - as above
    g,
    out,
    norm,
    earlier,
    given,
    columns,
    m,
    n,
    stride,
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
    x, q, plain = _read_rows(g, out, f, columns, m, n, stride, SUMS, KNOWN, WHOLE, ROWS, COLUMNS)
    if earlier is not None:
        before = tl.load(earlier + columns, mask=inside, other=0.0)
        q += before * before
    tl.store(norm + columns, tl.sqrt_rn(q), mask=inside)
    if not KNOWN:
        f = scale * tl.rsqrt(rho * r + weight * q + eps)
    _write_rows(x, g, out, f, columns, m, n, stride, KNOWN, WHOLE, ROWS)
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
    stride,  # from sample to sample in g; in out it is n
    width,
    blocks,
    rho,
    weight,
    scale,
    eps,
    KNOWN: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The formulas above, for one block of columns, or for several if there are sums."""
    first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if sums is None:
        _transform_block(
            g,
            out,
            norm,
            earlier,
            given,
            first,
            m,
            n,
            stride,
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
        for block in range(blocks):
            total += _transform_block(
                g,
                out,
                norm,
                earlier,
                given,
                first + block * width,
                m,
                n,
                stride,
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


@triton.jit
def numbers_at(numbers):  # pragma: no cover - as above
    """S, rho, eps and the loss's factor, of which a compiled pass has the place in memory."""
    scale, eps = tl.load(numbers).to(tl.float32), tl.load(numbers + 2).to(tl.float32)
    return scale, tl.load(numbers + 1), eps, tl.load(numbers + 3).to(tl.float32)


@triton.jit
def write_candidate(  # noqa: PLR0917 - as above
    q,
    r,
    candidate,
    columns,
    n,
    rho,
    loss_scale,
    e_before,
    m_before,
    is_new,
    elements,
    samples,
    UNIT_IS_SAMPLE: tl.constexpr,
):  # pragma: no cover - as above
    """Write the candidate of the new r of some columns; the new r, as T goes by it.

    They differ where a graph is counted twice (:mod:`.counts`): the candidate is NaN there.
    """
    inside = columns < n
    decay, share = rho.to(tl.float32), (1 - rho).to(tl.float32)
    unit = (m_before + samples) if UNIT_IS_SAMPLE else 1.0
    weight = share * (unit * unit / (e_before + elements))
    updated = decay * r + weight * (q / (loss_scale * loss_scale))
    if e_before > 0:  # gradients are accumulated: what has come is what the candidate is ahead
        ahead = tl.load(candidate + columns, mask=inside, other=0.0) - decay * r
        unit_before = m_before if UNIT_IS_SAMPLE else 1.0
        earlier = ahead * (e_before / (unit_before * unit_before * share))
        updated += tl.where(is_new, weight * earlier, 0.0)
    tl.store(candidate + columns, tl.where(is_new, updated, float("nan")), mask=inside)
    return updated


@triton.jit
def _transform_and_write_block(  # noqa: PLR0917 - as above
    g,
    out,
    given,
    candidate,
    counts,
    graph,
    numbers,
    columns,
    m,
    n,
    elements,
    samples,
    SUMS: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    KNOWN: tl.constexpr,
    UNIT_IS_SAMPLE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """One block of columns where all numbers lie on the device; its sums."""
    inside = columns < n
    r = tl.load(given + columns, mask=inside, other=0.0)
    scale, rho, eps, c = numbers_at(numbers)
    e_before, m_before = tl.load(counts), tl.load(counts + 1)
    is_new = tl.load(graph + 2) > tl.load(counts + 2)
    f = scale * tl.rsqrt(r + eps)
    x, q, plain = _read_rows(g, out, f, columns, m, n, n, SUMS, KNOWN, WHOLE, ROWS, COLUMNS)
    updated = write_candidate(
        q,
        r,
        candidate,
        columns,
        n,
        rho,
        c,
        e_before,
        m_before,
        is_new,
        elements,
        samples,
        UNIT_IS_SAMPLE,
    )
    if not KNOWN:
        f = scale * tl.rsqrt(updated + eps)
    _write_rows(x, g, out, f, columns, m, n, n, KNOWN, WHOLE, ROWS)
    return tl.where(inside, f, 0.0) * plain if OF_PRODUCT else plain


@triton.jit(do_not_specialize=["m", "blocks", "elements", "samples"])
def transform_and_write(  # noqa: PLR0917 - as above
    g,
    out,
    sums,  # or None
    given,  # r
    candidate,
    counts,
    graph,
    numbers,  # s, rho, eps and the loss's factor, in float64
    m,
    n,  # also from sample to sample
    width,
    blocks,
    elements,
    samples,
    KNOWN: tl.constexpr,
    UNIT_IS_SAMPLE: tl.constexpr,
    OF_PRODUCT: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The same in a compiled pass; it writes the candidate of the new r."""
    first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if sums is None:
        _transform_and_write_block(
            g,
            out,
            given,
            candidate,
            counts,
            graph,
            numbers,
            first,
            m,
            n,
            elements,
            samples,
            False,
            OF_PRODUCT,
            KNOWN,
            UNIT_IS_SAMPLE,
            WHOLE,
            ROWS,
            COLUMNS,
        )
    else:
        total = tl.zeros([COLUMNS], tl.float32)
        for block in range(blocks):
            total += _transform_and_write_block(
                g,
                out,
                given,
                candidate,
                counts,
                graph,
                numbers,
                first + block * width,
                m,
                n,
                elements,
                samples,
                True,
                OF_PRODUCT,
                KNOWN,
                UNIT_IS_SAMPLE,
                WHOLE,
                ROWS,
                COLUMNS,
            )
        tl.store(sums + first, total, mask=first < width)
