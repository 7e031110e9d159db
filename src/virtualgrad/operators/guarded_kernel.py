"""A step that a GPU makes only if all its numbers are finite (written in Triton; see below).

Each kernel walks over many tensors in one launch. Where they lie is read from memory: from
``begin`` on ``addresses`` has rows of ``count`` addresses, a row for each list of tensors
(parameters, gradients, ...), and ``sizes`` how many numbers a tensor has. A program has NUMBERS of
one tensor: ``parts`` tells of which, and which of its blocks.

``flag`` has the number of the last step with a NaN or an infinity, ``answer``, in memory of the
host, the same and, for each tensor looked at, that of the last step in which it had one. So nothing
needs to be set to zero, and nothing to be copied.

As in :mod:`.rms_kernel`, Triton reads the annotations. Imported when needed.
"""

import triton
import triton.language as tl


@triton.jit
def part_of(
    sizes, parts, NUMBERS: tl.constexpr
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """Which tensor a program has a part of, where in it, and which of that is inside."""
    program = tl.program_id(0)
    tensor = tl.load(parts + 2 * program)
    block = tl.load(parts + 2 * program + 1)
    at = block.to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    return tensor, at, at < tl.load(sizes + tensor)


@triton.jit
def tensor_at(addresses, place, like, ALIGNED: tl.constexpr):  # pragma: no cover - as above
    """A tensor by its address, which may be a multiple of 16; of the dtype of another one."""
    address = tl.load(addresses + place)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address.to(tl.pointer_type(like.dtype.element_ty))


@triton.jit(do_not_specialize=["begin", "first"])
def look(  # noqa: PLR0917 - Triton has no keywords here
    addresses,
    sizes,
    parts,
    like,
    flag,
    answer,
    begin,
    step,
    first,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # pragma: no cover - as above
    """Write the step's number where a tensor has a NaN or an infinity."""
    tensor, at, inside = part_of(sizes, parts, NUMBERS)
    numbers = tensor_at(addresses, begin + tensor, like, ALIGNED)
    x = tl.load(numbers + at, mask=inside, other=0.0).to(tl.float32)
    exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
    if tl.max((exponent == 0x7F800000).to(tl.int32), axis=0) > 0:
        tl.store(flag, step)
        tl.store(answer, step)
        tl.store(answer + 1 + first + tensor, step)


@triton.jit(do_not_specialize=["begin", "count"])
def descend(  # noqa: PLR0917 - as above
    addresses,
    sizes,
    parts,
    like,
    flag,
    begin,
    step,
    kept,
    momentum,
    one,
    rate,
    count,
    DECAYS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # pragma: no cover - as above
    """Theta <- kept theta; b <- momentum b + v; theta <- theta + rate b, each of them rounded.

    ``one`` is 1: a product that a compiler knows nothing of is rounded as torch's foreach functions
    round it, in which a sum is one with its product.
    """
    if tl.load(flag) != step:
        tensor, at, inside = part_of(sizes, parts, NUMBERS)
        theta = tensor_at(addresses, begin + tensor, like, ALIGNED) + at
        v = tl.load(
            tensor_at(addresses, begin + count + tensor, like, ALIGNED) + at, mask=inside
        ).to(tl.float32)
        now = tl.load(theta, mask=inside).to(tl.float32)
        if DECAYS:
            now = (now * kept).to(like.dtype.element_ty).to(tl.float32)
        if HAS_MOMENTUM:
            buffer = tensor_at(addresses, begin + 2 * count + tensor, like, ALIGNED) + at
            b = tl.load(buffer, mask=inside).to(tl.float32)
            b = (b * momentum).to(like.dtype.element_ty).to(tl.float32)
            v = tl.fma(v, one, b).to(like.dtype.element_ty)
            tl.store(buffer, v, mask=inside)
            v = v.to(tl.float32)
        tl.store(theta, tl.fma(v, rate, now).to(like.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["begin", "count"])
def update_means(  # noqa: PLR0917 - as above
    addresses,
    sizes,
    parts,
    like,
    flag,
    begin,
    step,
    rho,
    eps,
    scale,
    count,
    HAS_FACTORS: tl.constexpr,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # pragma: no cover - as above
    """R <- rho r + weight N^2, N the root of the sum of squares; f <- scale / sqrt(r + eps).

    Behind the addresses of r, N and, if it is made, f lie the weights.
    """
    if tl.load(flag) != step:
        tensor, at, inside = part_of(sizes, parts, NUMBERS)
        mean = tensor_at(addresses, begin + tensor, like, ALIGNED) + at
        norm = tl.load(
            tensor_at(addresses, begin + count + tensor, like, ALIGNED) + at, mask=inside
        )
        r = tl.load(mean, mask=inside)
        number = tl.load(addresses + begin + (3 if HAS_FACTORS else 2) * count + tensor)
        weight = number.to(tl.float64, bitcast=True).to(tl.float32)
        r = tl.fma(weight, norm * norm, r * rho)
        tl.store(mean, r, mask=inside)
        if HAS_FACTORS:
            factor = tensor_at(addresses, begin + 2 * count + tensor, like, ALIGNED) + at
            tl.store(factor, tl.rsqrt(r + eps) * scale, mask=inside)


@triton.jit(do_not_specialize=["begin", "count"])
def exchange(  # noqa: PLR0917 - as above
    addresses,
    sizes,
    parts,
    like,
    flag,
    begin,
    step,
    count,
    NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # pragma: no cover - as above
    """R <- candidate; or, where the step is not made, candidate <- r."""
    tensor, at, inside = part_of(sizes, parts, NUMBERS)
    mean = tensor_at(addresses, begin + tensor, like, ALIGNED) + at
    candidate = tensor_at(addresses, begin + count + tensor, like, ALIGNED) + at
    if tl.load(flag) != step:
        tl.store(mean, tl.load(candidate, mask=inside), mask=inside)
    else:
        tl.store(candidate, tl.load(mean, mask=inside), mask=inside)
