"""RMS at a site in an eager pass, by the kernels of a GPU; None where there are none for this g.

What is kept at a site is for the kind of g that was there last, which is compared at each call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.channels import Channels, Convolved, Incoming
from virtualgrad.operators.kernels import Factor, Fused, prepare
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients, prepare_norm
from virtualgrad.operators.kernels_of_sums import prepare_squares
from virtualgrad.operators.kernels_of_weights import WeightGradient, may_use_tf32, prepare_weight
from virtualgrad.operators.rms_settings import RMSSettings
from virtualgrad.operators.running import Running


def transform_fused(
    running: Running,
    g: Tensor,
    numbers: RMSSettings,
    channels: Channels | None,
    *,
    stale: bool,
) -> Incoming | None:
    """Return T(g), or what a convolution's weight gets under it, and take g in.

    With the total that a layer wants, if it comes with it.

    Args:
        running: the site.
        g: dJ/dsigma, in the shape in which its axes are counted.
        numbers: of the site.
        channels: of the layer.
        stale: whether T goes by the r of before: only then is a weight's gradient made.
    """
    options, convolved = (None, None) if channels is None else (channels[:4], channels.convolved)
    known: tuple[Any, ...] = (g.shape, g.stride(), g.dtype, options)
    if convolved is not None and stale:
        known += _kind_of(convolved, g.dtype)
    kernel = running.kernel("T", known, _prepare, running, g, channels, stale)
    if kernel is None:
        return None
    factor = _count(running, numbers, stale=stale)
    if convolved is not None and type(kernel) is WeightGradient:
        gradient = kernel(g, convolved.x, running.r, running.norm, factor[2:])
        running.norm = gradient.norm
        return Incoming(g, None, gradient.total, gradient.weight)
    made = kernel(g, running.r, running.norm, factor)
    running.norm = made.norm
    return Incoming(made.product, None, made.total, None, made.padded)


def _kind_of(convolved: Convolved, dtype: torch.dtype) -> tuple[Any, ...]:
    """What a kernel for a weight's gradient is chosen by, beside g."""
    x, kernel, window = convolved
    tf32 = dtype == torch.float32 and may_use_tf32()
    return x.shape, x.stride(), x.dtype, kernel, window, tf32


def _prepare(
    running: Running, g: Tensor, channels: Channels | None, stale: bool
) -> WeightGradient | Fused | None:
    """The kernel for a weight's gradient, if it can be had, or else the one for T(g)."""
    if stale and channels is not None and channels.convolved is not None:
        found = prepare_weight(g, running.r, running.averaged, channels.convolved, channels.total)
        if found is not None:
            return found
    return prepare(g, running.r, running.averaged, known=stale, channels=channels)


def norm_gradients_fused(
    running: Running,
    g: Tensor,
    norm: Norm,
    numbers: RMSSettings,
    into: Tensor | None,
    *,
    stale: bool,
) -> NormGradients | None:
    """Return the gradients of a batch norm, and take g in.

    Args:
        running: the site.
        g: dJ/dsigma.
        norm: the batch norm.
        numbers: of the site.
        into: where the input's gradient is to be written; None if it is not asked for.
        stale: whether T goes by the r of before.
    """
    x = norm.x
    known = (g.shape, g.stride(), g.dtype, x.stride(), x.dtype)
    fused = running.kernel("norm", known, prepare_norm, g, x, running.r, running.averaged)
    if fused is None:
        return None
    factor = _count(running, numbers, stale=stale)
    gradients: NormGradients
    gradients, running.norm = fused(g, norm, running.r, running.norm, factor, into)
    return gradients


def root_of_squares_fused(
    running: Running, g: Tensor, channels: Channels | None
) -> tuple[Tensor | None, Tensor | None]:
    """The root of the sum of g^2 over the averaged axes, where they are all but one; and of g.

    The latter where a layer wants a total; both None where there is no kernel.
    """
    axis = running.only_axis
    if axis is None:
        return None, None
    is_summed = channels is not None and channels.total is not None and channels.axis == axis
    known = (g.shape, g.stride(), g.dtype, is_summed)
    fused = running.kernel("squares", known, prepare_squares, g, axis, is_summed)
    return (None, None) if fused is None else fused(g)


def _count(running: Running, numbers: RMSSettings, *, stale: bool) -> Factor:
    """Count a pass that a kernel is to take in; the numbers of its factor."""
    running.elements += running.elements_of_pass
    running.samples += running.samples_of_pass
    if stale:
        return 1.0, 0.0, numbers.scale, numbers.eps
    return running.rho, running.weight, numbers.scale, numbers.eps
