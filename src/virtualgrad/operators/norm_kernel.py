"""The backward pass of a batch norm under T on the chip (written in Triton; imported when needed).

:func:`norm_sums` adds up what weight, bias and input get, in one pass over g and x; and
:func:`norm_input` makes the input's gradient of it. Symbols, and how g is read, are those of
:mod:`.rms_kernel`; as there, Triton reads the annotations.
"""

import triton
import triton.language as tl

from virtualgrad.operators.candidate_kernel import numbers_at, write_candidate


@triton.jit
def _channel_of(columns, n, channels, LAST: tl.constexpr):  # pragma: no cover - as in rms_kernel
    """The channel of each of n columns: they lie innermost (``LAST``), or outermost."""
    return columns % channels if LAST else columns // (n // channels)


@triton.jit
def _add_up(  # noqa: PLR0917 - Triton has no keywords here
    g,
    x,
    center,
    columns,
    m,
    n,
    stride,
    stride_x,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """Of some columns the sums over the rows of g^2, g (x - center) and g."""
    inside = columns < n
    rows = tl.arange(0, ROWS)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    plain = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, m, ROWS, num_stages=4):  # tiles that are on their way at once
        here = start + rows
        mask = (here < m)[:, None] & inside[None, :]
        at = here.to(tl.int64)
        y = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0)
        z = tl.load((x + at * stride_x)[:, None] + columns[None, :], mask, other=0.0)
        y = y.to(tl.float32)
        squares += y * y
        products += y * (z.to(tl.float32) - center[None, :])
        plain += y
    return tl.sum(squares, axis=0), tl.sum(products, axis=0), tl.sum(plain, axis=0)


@triton.jit
def _write_input(  # noqa: PLR0917 - as above
    g,
    x,
    out,
    rows,
    columns,
    center,
    slope,
    level,
    by,
    m,
    n,
    stride,
    stride_x,
):  # pragma: no cover - as above
    """Of some rows of some columns: by (g - level - slope (x - center))."""
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows.to(tl.int64)
    y = tl.load((g + at * stride)[:, None] + columns[None, :], mask, other=0.0).to(tl.float32)
    z = tl.load((x + at * stride_x)[:, None] + columns[None, :], mask, other=0.0).to(tl.float32)
    pulled = by[None, :] * (y - level[None, :] - slope[None, :] * (z - center[None, :]))
    to = (out + at * n)[:, None] + columns[None, :]
    tl.store(to, pulled.to(out.dtype.element_ty), mask)


@triton.jit
def _store_sums(  # noqa: PLR0917 - as above
    sums, columns, width, products, plain, by_weight, by_bias
):  # pragma: no cover - as above
    """One row for each of the four, of as many numbers as all programs have columns at a time."""
    inside = columns < width
    tl.store(sums + columns, products, mask=inside)
    sums += width  # one by one: three times the width may pass 2^31
    tl.store(sums + columns, plain, mask=inside)
    sums += width
    tl.store(sums + columns, by_weight, mask=inside)
    sums += width
    tl.store(sums + columns, by_bias, mask=inside)


@triton.jit(do_not_specialize=["m", "blocks"])
def norm_sums(  # noqa: PLR0917 - keyword arguments cost time at every launch
    g,
    x,
    mean,
    deviation,  # 1 / standard deviation; both of a channel
    norm,
    earlier,
    given,  # r
    sums,
    affine,  # the norm's weight
    out,  # for the input's gradient, where a channel is one column; None otherwise
    m,
    n,
    stride,  # from sample to sample, in g; in out it is n
    stride_x,
    channels,
    width,
    blocks,
    rho,
    weight,
    scale,
    eps,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """Sums of g x^, g, f g x^ and f g, over the samples of some columns, in one pass over g and x.

    With x^ = (x - mean) deviation, and f = s / sqrt(rho r + w q + eps): r updated first, or rho = 1
    and w = 0. A program takes one block of columns after the other, ``width`` apart, which is a
    multiple of the channels where there are several.
    """
    first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    channel = _channel_of(first, n, channels, LAST)
    center = tl.load(mean + channel, mask=first < n, other=0.0)
    spread = tl.load(deviation + channel, mask=first < n, other=0.0)
    by_weight = tl.zeros([COLUMNS], tl.float32)
    by_bias = tl.zeros([COLUMNS], tl.float32)
    all_products = tl.zeros([COLUMNS], tl.float32)
    all_plain = tl.zeros([COLUMNS], tl.float32)
    for block in range(blocks):
        columns = first + block * width
        inside = columns < n
        r = tl.load(given + columns, mask=inside, other=0.0)
        q, products, plain = _add_up(g, x, center, columns, m, n, stride, stride_x, ROWS, COLUMNS)
        if earlier is not None:
            before = tl.load(earlier + columns, mask=inside, other=0.0)
            q += before * before
        tl.store(norm + columns, tl.sqrt_rn(q), mask=inside)
        f = tl.where(inside, scale * tl.rsqrt(rho * r + weight * q + eps), 0.0)
        by_weight += f * products
        by_bias += f * plain
        all_products += products
        all_plain += plain
    all_products *= spread
    _store_sums(sums, first, width, all_products, all_plain, spread * by_weight, by_bias)
    if out is not None:
        by = spread * tl.load(affine + first, mask=first < n, other=0.0).to(tl.float32)
        slope, level = spread * all_products / m, all_plain / m
        for start in range(0, m, ROWS):
            rows = start + tl.arange(0, ROWS)
            _write_input(g, x, out, rows, first, center, slope, level, by, m, n, stride, stride_x)


@triton.jit(do_not_specialize=["m", "blocks", "elements", "samples"])
def norm_sums_and_write(  # noqa: PLR0917 - as above
    g,
    x,
    mean,
    deviation,
    sums,
    given,
    candidate,
    counts,
    graph,
    numbers,
    m,
    n,  # also from sample to sample
    channels,
    width,
    blocks,
    elements,
    samples,
    KNOWN: tl.constexpr,
    UNIT_IS_SAMPLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The same in a compiled pass: numbers lie on the device, and the new r is written."""
    first = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    channel = _channel_of(first, n, channels, True)
    center = tl.load(mean + channel, mask=first < n, other=0.0)
    spread = tl.load(deviation + channel, mask=first < n, other=0.0)
    scale, rho, eps, c = numbers_at(numbers)
    e_before, m_before = tl.load(counts), tl.load(counts + 1)
    is_new = tl.load(graph + 2) > tl.load(counts + 2)
    by_weight = tl.zeros([COLUMNS], tl.float32)
    by_bias = tl.zeros([COLUMNS], tl.float32)
    all_products = tl.zeros([COLUMNS], tl.float32)
    all_plain = tl.zeros([COLUMNS], tl.float32)
    for block in range(blocks):
        columns = first + block * width
        inside = columns < n
        r = tl.load(given + columns, mask=inside, other=0.0)
        q, products, plain = _add_up(g, x, center, columns, m, n, n, n, ROWS, COLUMNS)
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
        f = tl.where(inside, scale * tl.rsqrt((r if KNOWN else updated) + eps), 0.0)
        by_weight += f * products
        by_bias += f * plain
        all_products += products
        all_plain += plain
    _store_sums(sums, first, width, spread * all_products, all_plain, spread * by_weight, by_bias)


@triton.jit(do_not_specialize=["m"])
def norm_input(  # noqa: PLR0917 - as above
    g,
    x,
    mean,
    deviation,
    affine,
    totals,  # of which the first rows are the sums of g x^ and of g
    out,
    m,
    n,
    stride,
    stride_x,
    channels,
    blocks,  # of columns
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """W deviation (g - mean of g - x^ * mean of g x^), means over the batch and its positions."""
    program = tl.program_id(0)  # of a second axis there may be too many
    columns = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    channel = _channel_of(columns, n, channels, LAST)
    count = 1.0 * m * (n // channels)
    center = tl.load(mean + channel, mask=inside, other=0.0)
    spread = tl.load(deviation + channel, mask=inside, other=0.0)
    slope = spread * tl.load(totals + channel, mask=inside, other=0.0) / count
    level = tl.load(totals + channels + channel, mask=inside, other=0.0) / count
    by = spread * tl.load(affine + channel, mask=inside, other=0.0).to(tl.float32)
    rows = program // blocks * ROWS + tl.arange(0, ROWS)
    _write_input(g, x, out, rows, columns, center, slope, level, by, m, n, stride, stride_x)
