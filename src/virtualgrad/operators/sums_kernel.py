"""Sums of g on the chip (written in Triton; imported when needed).

:func:`norm_sums` makes what a batch norm's weight and bias get of T(g), :func:`part_squares` with
:func:`root_of_parts` the statistic of shared positions. Symbols, and how g is read, are those of
:mod:`.rms_kernel`; as there, Triton reads the annotations.
"""

import triton
import triton.language as tl

from virtualgrad.operators.rms_kernel import numbers_at, write_candidate


@triton.jit
def _add_up(  # noqa: PLR0917 - Triton has no keywords here
    g, x, center, columns, m, n, stride, stride_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """Of some columns the sums over the rows of g^2, g (x - center) and g."""
    inside = columns < n
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
    return tl.sum(squares, axis=0), tl.sum(products, axis=0), tl.sum(plain, axis=0)


@triton.jit(do_not_specialize=["m"])
def norm_sums(  # noqa: PLR0917 - keyword arguments cost time at every launch
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
    LAST: tl.constexpr,  # channels lie innermost, not outermost
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """For one block of columns: f * the sum of g x^, and f * the sum of g, in one pass over both.

    With x^ = (x - mean) deviation, and f = s / sqrt(rho r + w q + eps): r updated first, or rho = 1
    and w = 0.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    channel = columns % channels if LAST else columns // (n // channels)
    center = tl.load(mean + channel, mask=inside, other=0.0)
    q, products, plain = _add_up(g, x, center, columns, m, n, stride, stride_x, ROWS, COLUMNS)
    if earlier is not None:
        before = tl.load(earlier + columns, mask=inside, other=0.0)
        q += before * before
    tl.store(norm + columns, tl.sqrt_rn(q), mask=inside)
    r = tl.load(given + columns, mask=inside, other=0.0)
    f = scale * tl.rsqrt(rho * r + weight * q + eps)
    spread = tl.load(deviation + channel, mask=inside, other=0.0)
    tl.store(sums + columns, f * spread * products, mask=inside)
    tl.store(sums + n + columns, f * plain, mask=inside)


@triton.jit(do_not_specialize=["m", "elements", "samples"])
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
    elements,
    samples,
    KNOWN: tl.constexpr,
    UNIT_IS_SAMPLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # pragma: no cover - as above
    """The same in a compiled pass: numbers lie on the device, and the new r is written."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    channel = columns % channels  # they lie innermost
    center = tl.load(mean + channel, mask=inside, other=0.0)
    spread = tl.load(deviation + channel, mask=inside, other=0.0)
    r = tl.load(given + columns, mask=inside, other=0.0)
    scale, rho, eps, c = numbers_at(numbers)
    e_before, m_before = tl.load(counts), tl.load(counts + 1)
    is_new = tl.load(graph + 2) > tl.load(counts + 2)
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
    f = scale * tl.rsqrt((r if KNOWN else updated) + eps)
    tl.store(sums + columns, f * spread * products, mask=inside)
    tl.store(sums + n + columns, f * plain, mask=inside)


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
