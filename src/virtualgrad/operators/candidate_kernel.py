"""T of SVGD on the chip in a compiled pass, which writes the new r (written in Triton).

All numbers lie on the device: no host is asked in such a pass. Formulas, symbols and how g is read
are those of :mod:`.rms_kernel`; the *candidate* is what the next commit makes of r
(:mod:`.compiled`). As there, Triton reads the annotations.
"""

import triton
import triton.language as tl

from virtualgrad.operators.rms_kernel import first_columns, read_rows, write_rows


@triton.jit
def numbers_at(numbers):  # pragma: no cover - as in rms_kernel
    """S, rho, eps and the loss's factor, of which a compiled pass has the place in memory."""
    scale, eps = tl.load(numbers).to(tl.float32), tl.load(numbers + 2).to(tl.float32)
    return scale, tl.load(numbers + 1), eps, tl.load(numbers + 3).to(tl.float32)


@triton.jit
def write_candidate(  # noqa: PLR0917 - Triton has no keywords here
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
    into,
    m,
    n,
    apart,
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
    x, q, plain = read_rows(
        g, out, f, columns, into, m, n, n, apart, SUMS, KNOWN, WHOLE, ROWS, COLUMNS
    )
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
    write_rows(x, g, out, f, columns, into, m, n, n, apart, KNOWN, WHOLE, ROWS)
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
    CHANNELS: tl.constexpr,
    PITCH: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The same in a compiled pass; it writes the candidate of the new r."""
    first, into = first_columns(n, CHANNELS, PITCH, COLUMNS)
    apart = n // CHANNELS * PITCH
    if sums is None:  # as in rms_kernel
        _transform_and_write_block(
            g,
            out,
            given,
            candidate,
            counts,
            graph,
            numbers,
            first,
            into,
            m,
            n,
            apart,
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
        for block in tl.range(0, blocks, num_stages=3 if ROWS * COLUMNS <= 4096 else 1):
            total += _transform_and_write_block(
                g,
                out,
                given,
                candidate,
                counts,
                graph,
                numbers,
                first + block * width,
                first + block * width,
                m,
                n,
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
