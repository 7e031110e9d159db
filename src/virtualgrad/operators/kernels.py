r"""The operator of SVGD in one launch on a GPU, where that applies; its oracle beside it.

Eager passes through :class:`~virtualgrad.operators.RMS` read g twice, once for its norm and once
for the product, and with r updated first launch five small kernels more. The kernel of
``rms_kernel.py`` does it in one launch and one pass over g. With N the norm of each column (a
number of sigma, over the samples), w = (1 - rho) u^2 / e and N_0 of earlier passes:

    N = sqrt(N_0^2 + sum over samples of g^2)
    T(g) = s g / sqrt(rho r + w N^2 + eps),      rho = 1 and w = 0 for the r of before

and, where a layer asks for it, the sum of g or T(g) over all axes but its channels', which its bias
needs (:mod:`.channels`): torch would read all of it once more.

**Where it applies** (:func:`prepare` decides, once for a shape and its strides): r per number of
sigma, averaged over the sample axis alone; float32, bfloat16 or float16; the numbers of a sample
dense in memory, and r in the same order (contiguous or channels-last; samples may lie apart).
**Where not:** r shared over positions, or many samples of few numbers. There a column is long and
columns are few: one program per block of columns would leave most of the chip idle. Reductions that
split a column over many blocks are better, torch's own or that of :mod:`.kernels_of_sums`. Nor in
float64 and complex.

Triton comes with torch on Linux for CUDA. It is imported by the first site on a GPU; where it is
missing or cannot compile (no driver, no C compiler), ``prepare`` returns None, and plain torch
remains. A tile's first launch compiles it, about a second; Triton keeps the result on disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.channels import Channels, pitch_of
from virtualgrad.operators.columns import Addition
from virtualgrad.operators.launches import Launch
from virtualgrad.operators.tiles import (
    Summed,
    Tile,
    choose_tile,
    half_as_wide,
    share_columns,
    share_rows,
    sums_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS = 2**29  # they are counted in 32 bits, a block of them beyond the last one, too
Factor = tuple[float, float, float, float]
"""An :class:`Update`, or the same without names, which is made in a third of the time."""


class Update(NamedTuple):
    """What makes the factor; ``weight`` is w = (1 - rho) u^2 / e."""

    rho: float
    weight: float
    scale: float
    eps: float

    @property
    def is_known(self) -> bool:
        """As below."""
        return is_known(self)


def is_known(factor: Factor) -> bool:
    """Whether a factor does not hang on g: it is that of the r of before."""
    return factor[0] == 1 and factor[1] == 0


class Made(NamedTuple):
    """T(g), the new norm of each column, and for each channel the sum that was asked for.

    ``padded`` is T(g) with longer rows, where it was made so (:mod:`.channels`).
    """

    product: Tensor
    norm: Tensor
    total: Tensor | None
    padded: Tensor | None = None


class Fused:
    """T at one site for one shape, dtype and strides of g, ready to be launched.

    Attributes:
        tile: what one program holds.
        summed: what is summed on the way, if anything.
        pitch: how long rows of channels, the last axis of g, are to be in T(g), where nothing is
            summed; None: as in g.
    """

    def __init__(
        self,
        g: Tensor,
        axis: int,
        tile: Tile,
        summed: Summed | None = None,
        pitch: int | None = None,
    ) -> None:
        self.tile = tile
        self.summed = summed
        self.pitch = pitch
        m = g.shape[axis]
        n = g.numel() // m
        if pitch is None:
            shared = share_columns(n, tile, summed, g.element_size(), processors_of(g.device))
        else:
            shared = share_rows(n, tile, g.shape[-1])
        programs, width, blocks = shared
        self._width = width
        self._sizes = (m, n, g.stride(axis), width, blocks)
        of_product = summed is not None and summed.of_product
        row = (1, 1) if pitch is None else (g.shape[-1], pitch)
        self._meta = (of_product, *row, tile.whole, tile.rows, tile.columns)
        self._launch = Launch(_transform(), (programs, 1, 1), g, tile.warps)
        if summed is not None:
            self._added_up = Addition(g, (1, width), summed.channels, last=summed.last)
        # Of (samples, channels) there is nothing to add up: a sum for each channel, as r has one.
        is_matrix = g.dim() == 2
        self._sums_are_totals = summed is not None and is_matrix and summed.channels == width == n

    def __call__(self, g: Tensor, r: Tensor, earlier: Tensor | None, update: Factor) -> Made:
        """Return T(g), the new norm of each column, and the sums of channels.

        Args:
            g: as it was when this was prepared.
            r: the running mean, laid out as one sample of g.
            earlier: the norm of the passes since the last commit, None if this is the first.
            update: the numbers of the factor.
        """
        padded = None if self.pitch is None else g.new_empty(*g.shape[:-1], self.pitch)
        out = torch.empty_like(g) if padded is None else padded[..., : g.shape[-1]]
        norm = torch.empty_like(r)
        if self.summed is None:
            sums = None
        else:
            sums = torch.empty_like(r) if self._sums_are_totals else r.new_empty(1, self._width)
        earlier = in_order_of(norm, earlier)
        rho, weight, scale, eps = update
        known = is_known(update)
        # An int would be another signature, and compiled anew for some values.
        numbers = (float(rho), float(weight), float(scale), float(eps), known)
        self._launch(
            (g, out, norm, earlier, r, sums),
            (*self._sizes, *numbers, *self._meta),
            (known, None if earlier is None else earlier.dtype),
            (g, r, earlier),
        )
        total = sums if sums is None or self._sums_are_totals else self._added_up(sums)[0]
        return Made(out, norm, total, padded)


def in_order_of(norm: Tensor, earlier: Tensor | None) -> Tensor | None:
    """The norm of earlier passes, which may be plain torch's, with the strides of the new one."""
    if earlier is None or earlier.stride() == norm.stride():
        return earlier
    return torch.empty_like(norm).copy_(earlier)


def plain(  # noqa: PLR0917 - as a kernel is called
    g: Tensor,
    r: Tensor,
    earlier: Tensor | None,
    update: Update,
    axis: int,
    channels: Channels | None = None,
) -> Made:
    """The oracle: what :class:`Fused` returns, by the formulas above, in the precision of r."""
    wide = g.to(r.dtype)
    squares = wide.square().sum(axis)
    if earlier is not None:
        squares = squares + earlier.square()
    rho, weight, scale, eps = update
    factor = scale * torch.rsqrt(rho * r + weight * squares + eps)
    product, total = wide * factor.unsqueeze(axis), None
    if channels is not None and channels.total is not None:
        others = [other for other in range(g.dim()) if other != channels.axis]
        total = (wide if channels.total == "g" else product).sum(others)
    return Made(product.to(g.dtype), squares.sqrt(), total)


def prepare(
    g: Tensor,
    r: Tensor,
    averaged: tuple[int, ...],
    *,
    known: bool,
    channels: Channels | None = None,
) -> Fused | None:
    """The kernel for a g of this shape, dtype and strides; None where plain torch is to be used.

    Args:
        g: in the view in which its axes are counted.
        r: the running mean beside it.
        averaged: the axes over which g^2 is averaged.
        known: whether the factor is, before g is read.
        channels: of the layer, which may want sums; it gets them if they cost little.
    """
    if len(averaged) != 1 or not fits(g, r, averaged[0]) or not is_usable(g.device):
        return None
    m = g.shape[averaged[0]]
    n = g.numel() // m
    processors = processors_of(g.device)
    pitch = _pitch(g, averaged[0], channels)
    summed = None if channels is None or pitch else sums_of(g, averaged[0], channels)
    kind = (m, n, g.element_size(), processors)
    tile = choose_tile(*kind, known=known, summed=summed is not None)
    if not tile.whole and n < tile.columns * processors:  # long columns, and few
        return None
    if pitch is not None:
        tile = half_as_wide(tile)
    if summed is not None and summed.channels < n:
        width = share_columns(n, tile, summed, *kind[2:]).width
        # Written and read, they should be less than half of what torch would read: g.
        if 4 * width * 4 > m * n * g.element_size():
            summed, tile = None, choose_tile(*kind, known=known)
    return Fused(g, averaged[0], tile, summed, pitch)


def _pitch(g: Tensor, axis: int, channels: Channels | None) -> int | None:
    """How long rows of channels are to be in T(g), where they had better not be as in g."""
    if channels is None or not channels.may_pad or channels.axis != g.dim() - 1:
        return None
    pitch = pitch_of(g.shape[-1], g.element_size())
    in_order = axis == 0 and g[0].is_contiguous()
    return pitch if pitch > g.shape[-1] and in_order else None


def fits(g: Tensor, r: Tensor, axis: int) -> bool:
    """Whether g is m rows of n dense columns in memory, and r one such row, in float32."""
    m = g.shape[axis]
    if type(g) is not Tensor:  # a shard of several processes, say, has no memory of its own
        return False
    if g.dtype not in DTYPES or r.dtype != torch.float32 or g.numel() == 0:
        return False
    n = g.numel() // m
    kept = [a for a in range(g.dim()) if a != axis and g.shape[a] > 1]
    in_r = [a if a < axis else a - 1 for a in kept]
    same_order = [g.stride(a) for a in kept] == [r.stride(a) for a in in_r]
    # T(g) gets the strides that torch gives it: dense, in the order of g's. Samples that overlap
    # (an expanded g) leave that order open.
    out = torch.empty_like(g, device="meta")
    in_rows = m == 1 or out.stride(axis) == n
    same_out = [g.stride(a) for a in kept] == [out.stride(a) for a in kept]
    in_order = same_order and in_rows and same_out
    return are_dense(g, kept) and in_order and n < MOST_COLUMNS


def are_dense(g: Tensor, axes: Sequence[int], size: int = 1) -> bool:
    """Whether some axes lie in memory without gaps, around a block of some numbers."""
    for axis in sorted(axes, key=g.stride):
        if g.stride(axis) != size:
            return False
        size *= g.shape[axis]
    return True


def _transform() -> Any:
    from virtualgrad.operators.rms_kernel import transform  # noqa: PLC0415 - imports Triton

    return transform


@cache
def _interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on tensors of the CPU: the tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def may_launch(device: torch.device) -> bool:
    """Whether a device is of a kind for which there are kernels; asked before anything else."""
    return device.type == "cuda" or (device.type == "cpu" and _interpreted())


def processors_of(device: torch.device) -> int:
    """How many programs a device runs at once, at least."""
    if device.type == "cpu":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def is_usable(device: torch.device) -> bool:
    """Whether a kernel can be launched for a tensor on the device."""
    if device.type == "cpu":
        return _interpreted() and _launches(device)
    # Compiling, which loads modules, has no place inside the capture of a CUDA graph.
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    return _launches(device)


@cache
def _launches(device: torch.device) -> bool:
    """Try it with one small g: whatever is missing shows here, and not in a backward pass."""
    try:
        g = torch.ones(1, 32, dtype=torch.float32, device=device)
        fused = Fused(g, 0, Tile(1, 32, 1, True))
        for _ in range(2):  # the second launch may go by what the first has left
            if not fused(g, g[0], None, Update(1, 0, 1, 3)).product.eq(0.5).all():
                return False
    except Exception:  # no Triton, no C compiler, a GPU too old for it: plain torch then
        return False
    return True
