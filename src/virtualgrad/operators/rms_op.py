r"""T of SVGD as one op of a compiled pass, where a compiler alone would do the work twice.

Compilers fuse T with what makes g. Where that is costly (the derivative of GELU, of a norm), they
do it anew in each of three kernels: the one that sums g^2, the one that makes T(g), and the one
that makes g for the pull-back into activations. An op that they do not look into has g made once,
and then takes one pass over it:

    q = sum over samples of g^2
    candidate <- rho r + (1 - rho) (u^2 / e) (q / c^2 + what earlier passes have brought)
    T(g) = s g / sqrt(r + eps),    r of before, or the candidate
    the sum of g or T(g) over all axes but the last, for a bias

with the symbols of :mod:`.running`, and c the factor of the loss. :func:`norm_sums` adds up
what the gradients of a batch norm need in such a pass (:mod:`.kernels_of_norms`), and
:func:`squares` the statistic of shared positions, as sums of g^2 (and g) over parts of the rows.

**Layouts.** Ops want g in memory as r lies, and get it so: channels-last images keep that layout.
But asked for strides in the backward pass of a Function, torch.compile copies its g into contiguous
memory, and all that is made of it. So what surrounds the ops asks sigma, in the forward pass; the
ops themselves are traced later, and may ask.

Plain torch (:mod:`.compiled`) is the oracle of all three.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators import kernels, kernels_of_norms, tiles
from virtualgrad.operators.channels import Total, pitch_of
from virtualgrad.operators.columns import (
    add_positions_by_torch,
    launch_of_addition,
    may_add_by_kernel,
    split_columns,
)
from virtualgrad.operators.kernels_of_norms import WARPS_OF_SUMS, Norm, tile_of_sums
from virtualgrad.operators.kernels_of_sums import WARPS, split_rows
from virtualgrad.operators.launches import OpLaunch
from virtualgrad.operators.tiles import Summed


@settled_while_tracing
def is_usable(device: torch.device) -> bool:
    """Whether the ops can be used for tensors of a device; asked while a pass is traced."""
    return device.type == "cuda" and kernels.is_usable(device) and bool(_ops())


class Kept(NamedTuple):
    """What lies on the device, and how a pass is counted.

    Attributes:
        r: the running mean; it lies dense.
        candidate: what the next commit makes of it, written by the ops.
        counts: (e, m, last) since the last commit (:mod:`.counts`), left as they are.
        graph: the number of the pass's graph, thrice.
        numbers: s, rho, eps and c, in float64.
        elements: e of this pass.
        samples: m of this pass.
        stale: whether T goes by the r of before.
        unit_is_sample: whether g is to be that of one sample's loss.
    """

    r: Tensor
    candidate: Tensor
    counts: Tensor
    graph: Tensor
    numbers: Tensor
    elements: int
    samples: int
    stale: bool
    unit_is_sample: bool


def transform(
    g: Tensor, kept: Kept, total: Total | None = None, *, may_pad: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return T(g), and write the candidate; g has samples along its first axis.

    And the sum of g, or of T(g), over all axes but the last, as ``total`` says. If it ``may_pad``,
    there may be more numbers behind each row of T(g), that mean nothing (:mod:`.channels`).
    """
    # Of 16 bits a compiler makes longer rows by itself, in less than what they cost here.
    may_pad = may_pad and g.element_size() == 4
    pitch = pitch_of(g.shape[-1], g.element_size()) if may_pad else 0
    product, summed = torch.ops.virtualgrad.rms_transform(g, *kept, total or "", pitch)
    return product, None if total is None else summed


def norm_sums(g: Tensor, norm: Norm, kept: Kept) -> Tensor:
    """Return, for each channel of a batch norm, the sums of g x^, g, T(g) x^ and T(g), as rows.

    It writes the candidate.
    """
    sums: Tensor = torch.ops.virtualgrad.norm_sums(g, *norm[:3], *kept)
    return sums


def squares(g: Tensor, *, is_summed: bool = False) -> Tensor:
    """Sums of g^2, and of g if ``is_summed``, over parts of the rows.

    They have the axes (1 or 2, parts, the last axis of g).
    """
    parts: Tensor = torch.ops.virtualgrad.part_squares(g, is_summed)
    return parts


def launch_of_transform(
    g: Tensor, kept: Kept, total: str = "", pitch: int = 0
) -> tuple[Tensor, Tensor | None, OpLaunch]:
    """T(g) and sums of columns, as yet empty, and the launch that makes them.

    T(g) with longer rows if a ``pitch`` is given, and they lie one behind the other in g;
    otherwise sums where a ``total`` is wanted, and channels lie innermost.
    """
    r, m, n = kept.r, g.shape[0], kept.r.numel()
    g = _laid_out_as(r, g)
    channels, of_product = r.shape[-1], total == "T(g)"
    is_padded = pitch > channels and r.is_contiguous()
    out = g.new_empty(*g.shape[:-1], pitch) if is_padded else torch.empty_like(g)
    most = m if type(m) is int else 2**20  # of any size (a compiler's symbol): it is walked over
    processors = kernels.processors_of(g.device)
    innermost = r.stride(-1) == 1 or channels == 1
    sums_here = total and innermost and not is_padded
    summed = Summed(channels, True, of_product) if sums_here else None
    kind = (most, n, g.element_size(), processors)
    tile = tiles.choose_tile(*kind, known=kept.stale, summed=summed is not None)
    if is_padded:
        tile = tiles.half_as_wide(tile)
        row, shared = (channels, pitch), tiles.share_rows(n, tile, channels)
    else:
        row, shared = (1, 1), tiles.share_columns(n, tile, summed, *kind[2:])
    programs, width, blocks = shared
    sums = None
    if summed is not None:
        sums = torch.empty(1, width, dtype=torch.float32, device=g.device)
    tensors = (g, out, sums, *kept[:5])
    sizes = (m, n, width, blocks, kept.elements, kept.samples)
    modes = (kept.stale, kept.unit_is_sample, of_product, *row)
    shape = (tile.whole, tile.rows, tile.columns)
    return out, sums, OpLaunch((programs,), (*tensors, *sizes, *modes, *shape), tile.warps)


def launch_of_norm_sums(
    g: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, kept: Kept
) -> tuple[Tensor, OpLaunch]:
    """Sums of columns, as yet empty, and the launch that makes them; channels lie innermost."""
    r, m, n, channels = kept.r, g.shape[0], kept.r.numel(), kept.r.shape[0]
    tile = tile_of_sums(n)
    programs, width, blocks = split_columns(
        n, channels, tile.columns, last=True, most=kernels_of_norms.MOST_PROGRAMS
    )
    sums = torch.empty(4, width, dtype=torch.float32, device=g.device)
    tensors = (_laid_out_as(r, g), _laid_out_as(r, x), mean, deviation, sums, *kept[:5])
    sizes = (m, n, channels, width, blocks, kept.elements, kept.samples)
    modes = (kept.stale, kept.unit_is_sample, *tile)
    return sums, OpLaunch((programs,), (*tensors, *sizes, *modes), WARPS_OF_SUMS)


def launch_of_totals(sums: Tensor, channels: int) -> tuple[Tensor, OpLaunch] | None:
    """Those sums, added up over positions, as yet empty, and the launch; None where torch adds."""
    rows, width = sums.shape
    if width == channels or not may_add_by_kernel(width, channels, last=True):
        return None
    grid, sizes, warps = launch_of_addition(rows, width, channels)
    totals = torch.empty(rows, channels, dtype=torch.float32, device=sums.device)
    return totals, OpLaunch(grid, (sums, totals, *sizes), warps)


def _laid_out_as(r: Tensor, g: Tensor) -> Tensor:
    """The numbers of each sample as r lies, and sample behind sample; as a rule g itself."""
    strides = (r.numel(), *r.stride())
    if g.stride() == strides:
        return g
    return torch.empty_strided(g.shape, strides, dtype=g.dtype, device=g.device).copy_(g)


def launch_of_squares(g: Tensor, *, is_summed: bool) -> tuple[Tensor, OpLaunch]:
    """The sums of parts, as yet empty, and the launch that makes them."""
    g = g.contiguous()
    n = g.shape[-1]
    m = g.numel() // n
    split = split_rows(m, n, kernels.processors_of(g.device))
    shape = (1 + is_summed, split.parts, n)
    parts = torch.empty(shape, dtype=torch.float32, device=g.device)
    arguments = (g, parts, m, n, split.share, split.rows, split.columns, is_summed)
    return parts, OpLaunch((split.parts, split.blocks), arguments, WARPS)


@cache
def _ops() -> tuple[Any, ...]:
    """Register the ops, once; a compiler that sees into them finds one kernel each."""
    from torch.library import triton_op, wrap_triton  # noqa: PLC0415 - with Triton alone

    from virtualgrad.operators import (  # noqa: PLC0415 - import Triton
        candidate_kernel,
        norm_kernel,
        sums_kernel,
    )

    def add_up(sums: Tensor, channels: int) -> Tensor:
        added = launch_of_totals(sums, channels)
        if added is None:
            return add_positions_by_torch(sums, channels, last=True)
        totals, (grid, arguments, warps) = added
        wrap_triton(sums_kernel.add_positions)[grid](*arguments, num_warps=warps)
        return totals

    @triton_op("virtualgrad::rms_transform", mutates_args={"candidate"})
    def rms_transform(  # noqa: PLR0917 - an op has no tuples
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
        total: str,
        pitch: int,
    ) -> tuple[Tensor, Tensor]:
        kept = Kept(r, candidate, counts, graph, numbers, elements, samples, stale, unit_is_sample)
        out, sums, (grid, arguments, warps) = launch_of_transform(g, kept, total, pitch)
        wrap_triton(candidate_kernel.transform_and_write)[grid](*arguments, num_warps=warps)
        if sums is not None:
            return out, add_up(sums, r.shape[-1])[0]
        if total:
            of = out[..., : g.shape[-1]] if total == "T(g)" else g
            return out, of.sum(list(range(g.dim() - 1)), dtype=torch.float32)
        return out, torch.empty(0, device=g.device)

    @triton_op("virtualgrad::norm_sums", mutates_args={"candidate"})
    def norm_sums(  # noqa: PLR0917 - as above
        g: Tensor,
        x: Tensor,
        mean: Tensor,
        deviation: Tensor,
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
        kept = Kept(r, candidate, counts, graph, numbers, elements, samples, stale, unit_is_sample)
        sums, (grid, arguments, warps) = launch_of_norm_sums(g, x, mean, deviation, kept)
        wrap_triton(norm_kernel.norm_sums_and_write)[grid](*arguments, num_warps=warps)
        return add_up(sums, r.shape[0])

    @triton_op("virtualgrad::part_squares", mutates_args=())
    def part_squares(g: Tensor, is_summed: bool) -> Tensor:
        parts, (grid, arguments, warps) = launch_of_squares(g, is_summed=is_summed)
        wrap_triton(sums_kernel.part_squares)[grid](*arguments, num_warps=warps)
        return parts

    return rms_transform, norm_sums, part_squares
