r"""The weight gradient of a convolution under T, on the chip (written in Triton).

Formulas and symbols are those of :mod:`.kernels_of_weights`. A program owns POSITIONS positions p
of sigma, CHANNELS channels c and TAPS columns j of the weight, and walks over its share of the
samples n:

    acc_cj += sum over p of (f_pc g_npc) x_npj,       q_pc += g_npc^2

f, q and the places of x_pj within a sample stay on the chip all the way, and so does acc. T(g) goes
from registers to the tensor cores, and never to memory.

As in :mod:`.rms_kernel`, Triton reads the annotations.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m", "share"])
def weight_parts(  # noqa: PLR0917 - Triton has no keywords here
    g,
    x,
    given,  # r, or None where T only sees g
    numbers,  # s, rho, eps and the loss's factor, in float64; None where s and eps are given
    parts,
    squares,  # sums of g^2, or None
    sums,  # of g or T(g), for a bias, or None
    m,
    share,
    positions,
    channels,
    taps,
    width,
    g_sample,
    x_sample,
    x_row,
    x_column,
    x_height,
    x_width,
    scale,  # s; one where T only sees g
    eps,
    OF_PRODUCT: tl.constexpr,
    K: tl.constexpr,  # channels of x
    KERNEL_WIDTH: tl.constexpr,
    STRIDE_DOWN: tl.constexpr,
    STRIDE_ALONG: tl.constexpr,
    PADDING_DOWN: tl.constexpr,
    PADDING_ALONG: tl.constexpr,
    DILATION_DOWN: tl.constexpr,
    DILATION_ALONG: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """One part of the weight gradient: of some positions and a share of the samples."""
    blocks_c, blocks_j = tl.cdiv(channels, CHANNELS), tl.cdiv(taps, TAPS)
    blocks_p = tl.cdiv(positions, POSITIONS)
    # Programs that run side by side read the same g, or the same x.
    block = tl.program_id(0) % (blocks_c * blocks_j)
    part = tl.program_id(0) // (blocks_c * blocks_j)
    first = (part // blocks_p) * share
    p = (part % blocks_p) * POSITIONS + tl.arange(0, POSITIONS)
    c = (block // blocks_j) * CHANNELS + tl.arange(0, CHANNELS)
    j = (block % blocks_j) * TAPS + tl.arange(0, TAPS)
    # Where x_pj lies within a sample, and whether it lies in the image.
    row = (p // width * STRIDE_DOWN - PADDING_DOWN)[:, None]
    row = row + (j // K // KERNEL_WIDTH * DILATION_DOWN)[None, :]
    column = (p % width * STRIDE_ALONG - PADDING_ALONG)[:, None]
    column = column + (j // K % KERNEL_WIDTH * DILATION_ALONG)[None, :]
    at_x = row * x_row + column * x_column + (j % K)[None, :]
    in_x = (p < positions)[:, None] & (j < taps)[None, :]
    if PADDING_DOWN > 0 or PADDING_ALONG > 0:
        in_x = in_x & (row >= 0) & (row < x_height) & (column >= 0) & (column < x_width)
    at_g = p[:, None] * channels + c[None, :]
    in_g = (p < positions)[:, None] & (c < channels)[None, :]
    f = scale
    if given is not None:
        if numbers is not None:
            scale, eps = tl.load(numbers).to(tl.float32), tl.load(numbers + 2).to(tl.float32)
        f = scale * tl.rsqrt(tl.load(given + at_g, mask=in_g, other=1.0) + eps)
    acc = tl.zeros([CHANNELS, TAPS], tl.float32)
    q = tl.zeros([POSITIONS, CHANNELS], tl.float32)
    plain = tl.zeros([POSITIONS, CHANNELS], tl.float32)
    g += first.to(tl.int64) * g_sample
    x += first.to(tl.int64) * x_sample
    for _ in tl.range(first, tl.minimum(first + share, m), num_stages=STAGES):
        y = tl.load(g + at_g, mask=in_g, other=0.0)
        z = tl.load(x + at_x, mask=in_x, other=0.0)
        wide = y.to(tl.float32)
        if squares is not None:
            q += wide * wide
        if sums is not None:
            plain += wide
        # Where T only sees g, it is multiplied by one: a y that goes to the tensor cores straight
        # from where it was copied to is overwritten too early by Triton 3.6, if it is read as well.
        y = (wide * f).to(y.dtype)
        acc = tl.dot(tl.trans(y), z, acc, input_precision="tf32")
        g += g_sample
        x += x_sample
    at = (part.to(tl.int64) * channels + c)[:, None] * taps + j[None, :]
    tl.store(parts + at, acc, mask=(c < channels)[:, None] & (j < taps)[None, :])
    ours = c + block % blocks_j * channels < channels  # of what is the same for all j
    if squares is not None:
        at_q = (part // blocks_p).to(tl.int64) * positions * channels + at_g
        tl.store(squares + at_q, q, mask=(p < positions)[:, None] & ours[None, :])
    if sums is not None:
        if OF_PRODUCT:
            plain *= f
        tl.store(sums + part * channels + c, tl.sum(plain, 0), mask=ours)


@triton.jit(do_not_specialize=["count"])
def add_parts(  # noqa: PLR0917 - as above
    parts,
    weight,
    squares,  # or None
    earlier,  # roots of earlier passes, or None
    roots,  # None without squares
    count,
    n,
    blocks,
    splits,
    columns,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROOTS: tl.constexpr,
):  # pragma: no cover - as above
    """The sum of all parts, in a fixed order, rounded once; and the roots of sums of squares."""
    program = tl.program_id(0)
    if program < blocks:
        at = program * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([PARTS, COLUMNS], tl.float32)
        for start in range(0, count, PARTS):
            here = start + tl.arange(0, PARTS)
            mask = (here < count)[:, None] & (at < n)[None, :]
            total += tl.load((parts + here.to(tl.int64) * n)[:, None] + at[None, :], mask, other=0)
        tl.store(weight + at, tl.sum(total, 0).to(weight.dtype.element_ty), mask=at < n)
    elif squares is not None:
        place = (program - blocks) * ROOTS + tl.arange(0, ROOTS)
        inside = place < columns
        q = tl.zeros([ROOTS], tl.float32)
        for _ in range(splits):
            q += tl.load(squares + place, mask=inside, other=0.0)
            squares += columns
        if earlier is not None:
            before = tl.load(earlier + place, mask=inside, other=0.0)
            q += before * before
        tl.store(roots + place, tl.sqrt_rn(q), mask=inside)
