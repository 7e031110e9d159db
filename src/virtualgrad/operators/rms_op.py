r"""T of SVGD as one op of a compiled pass, where a compiler alone would do the work twice.

Compilers fuse T with what makes g. Where that is costly (the derivative of GELU, of a norm), they
do it anew in each of three kernels: the one that sums g^2, the one that makes T(g), and the one
that makes g for the pull-back into activations. An op that they do not look into has g made once,
and then takes one pass over it:

    q = sum over samples of g^2
    candidate <- rho r + (1 - rho) (u^2 / e) (q / c^2 + what earlier passes have brought)
    T(g) = s g / sqrt(r + eps),    r of before, or the candidate

with the symbols of :mod:`.running`, and c the factor of the loss. :func:`squares` is the same for
shared positions: sums of g^2 over parts of the rows.

Plain torch (:mod:`.compiled`) is the oracle of both.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators import kernels
from virtualgrad.operators.kernels_of_sums import split_rows


@settled_while_tracing
def is_usable(device: torch.device) -> bool:
    """Whether the ops can be used for tensors of a device; asked while a pass is traced."""
    return device.type == "cuda" and kernels.is_usable(device) and bool(_ops())


def transform(  # noqa: PLR0917 - tensors, and what they are summed to
    g: Tensor,
    r: Tensor,
    candidate: Tensor,
    counts: Tensor,
    graph: Tensor,
    numbers: Tensor,
    elements: int,
    samples: int,
    stale: bool,
    unit_is_sample: bool,
) -> Tensor:
    """Return T(g), and write the candidate.

    Args:
        g: samples along the first axis, and behind it as large as r.
        r: the running mean, contiguous.
        candidate: what the next commit makes of it.
        counts: (e, m, last) since the last commit (:mod:`.counts`), left as they are.
        graph: the number of the pass's graph, thrice.
        numbers: s, rho, eps and c, in float64.
        elements: e of this pass.
        samples: m of this pass.
        stale: whether T goes by the r of before.
        unit_is_sample: whether g is to be that of one sample's loss.
    """
    result: Tensor = torch.ops.virtualgrad.rms_transform(
        g, r, candidate, counts, graph, numbers, elements, samples, stale, unit_is_sample
    )
    return result


def squares(g: Tensor) -> Tensor:
    """Sums of g^2 over parts of the rows: (parts, the last axis of g)."""
    parts: Tensor = torch.ops.virtualgrad.part_squares(g)
    return parts


class Launch(NamedTuple):
    """A launch of a kernel: its grid, its arguments, and how many warps a program has."""

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int


def launch_of_transform(  # noqa: PLR0917 - as above
    g: Tensor,
    r: Tensor,
    candidate: Tensor,
    counts: Tensor,
    graph: Tensor,
    numbers: Tensor,
    elements: int,
    samples: int,
    stale: bool,
    unit_is_sample: bool,
) -> tuple[Tensor, Launch]:
    """T(g), as yet empty, and the launch that makes it."""
    m, n = g.shape[0], r.numel()
    out = torch.empty_strided(g.shape, (n, *r.stride()), dtype=g.dtype, device=g.device)
    if g.stride() != out.stride():  # as r lies, and sample behind sample
        g = torch.empty_like(out).copy_(g)
    most = m if type(m) is int else 2**20  # of any size (a compiler's symbol): it is walked over
    processors = kernels.processors_of(g.device)
    tile = kernels.choose_tile(most, n, g.element_size(), processors, known=stale)
    tensors = (g, out, r, candidate, counts, graph, numbers)
    modes = (stale, unit_is_sample, tile.whole, tile.rows, tile.columns)
    arguments = (*tensors, m, n, elements, samples, *modes)
    return out, Launch((-(-n // tile.columns),), arguments, tile.warps)


def launch_of_squares(g: Tensor) -> tuple[Tensor, Launch]:
    """The sums of parts, as yet empty, and the launch that makes them."""
    g = g.contiguous()
    n = g.shape[-1]
    m = g.numel() // n
    split = split_rows(m, n, 4 * kernels.processors_of(g.device))
    parts = torch.empty(split.parts, n, dtype=torch.float32, device=g.device)
    arguments = (g, parts, m, n, split.share, split.rows, split.columns)
    return parts, Launch((split.parts, split.blocks), arguments, 8)


@cache
def _ops() -> tuple[Any, ...]:
    """Register the ops, once; a compiler that sees into them finds one kernel each."""
    from torch.library import triton_op, wrap_triton  # noqa: PLC0415 - with Triton alone

    from virtualgrad.operators import rms_kernel, sums_kernel  # noqa: PLC0415 - import Triton

    @triton_op("virtualgrad::rms_transform", mutates_args={"candidate"})
    def rms_transform(  # noqa: PLR0917 - as above
        g: Tensor,
        r: Tensor,
        candidate: Tensor,
        counts: Tensor,
        graph: Tensor,
        numbers: Tensor,
        elements: int,
        samples: int,
        stale: bool,
        unit_is_sample: bool,
    ) -> Tensor:
        given = (g, r, candidate, counts, graph, numbers, elements, samples, stale, unit_is_sample)
        out, (grid, arguments, warps) = launch_of_transform(*given)
        wrap_triton(rms_kernel.transform_and_write)[grid](*arguments, num_warps=warps)
        return out

    @triton_op("virtualgrad::part_squares", mutates_args=())
    def part_squares(g: Tensor) -> Tensor:
        parts, (grid, arguments, warps) = launch_of_squares(g)
        wrap_triton(sums_kernel.part_squares)[grid](*arguments, num_warps=warps)
        return parts

    return rms_transform, part_squares
