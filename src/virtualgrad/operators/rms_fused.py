"""RMS at a site in an eager pass, by the kernels of a GPU; None where there are none for this g."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, float32

from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.kernels import Update, prepare
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients, prepare_norm
from virtualgrad.operators.kernels_of_sums import prepare_squares
from virtualgrad.operators.kernels_of_weights import may_use_tf32, prepare_weight
from virtualgrad.operators.rms_settings import RMSSettings
from virtualgrad.operators.running import Running


class Moment(NamedTuple):
    """What holds for all sites of a pass: whether T goes by the r of before, the loss's factor."""

    stale: bool
    loss_scale: float


def transform_fused(
    running: Running,
    g: Tensor,
    numbers: RMSSettings,
    moment: Moment,
    channels: Channels | None,
) -> Incoming | None:
    """Return T(g), with the total that a layer wants if it comes with it, and take g in."""
    known = (g.shape, g.stride(), g.dtype, None if channels is None else channels[:4])
    fused = running.kernel(
        "T",
        known,
        lambda: prepare(g, running.r, running.averaged, known=moment.stale, channels=channels),
    )
    if fused is None:
        return None
    update = _count(running, numbers, moment)
    made = fused(g, running.r, running.norm, update)
    running.norm = made.norm
    return Incoming(made.product, None, made.total, None, made.padded)


def weight_gradient_fused(
    running: Running, g: Tensor, numbers: RMSSettings, moment: Moment, channels: Channels
) -> Incoming | None:
    """Return what a convolution's weight and bias get under T, and take g in.

    Args:
        running: the site.
        g: dJ/dsigma.
        numbers: of the site.
        moment: of the pass; T must go by the r of before.
        channels: of the convolution.
    """
    convolved, total = channels.convolved, channels.total
    if convolved is None or not moment.stale:
        return None
    x = convolved.x
    of_x = (x.shape, x.stride(), x.dtype, *convolved[1:])
    known = (g.shape, g.stride(), g.dtype, *of_x, total, g.dtype == float32 and may_use_tf32())
    fused = running.kernel(
        "weight",
        known,
        lambda: prepare_weight(g, running.r, running.averaged, convolved, total),
    )
    if fused is None:
        return None
    update = _count(running, numbers, moment)
    made = fused(g, x, running.r, running.norm, (update.scale, update.eps))
    running.norm = made.norm
    return Incoming(g, None, made.total, made.weight)


def norm_gradients_fused(  # noqa: PLR0917 - called once for every layer
    running: Running,
    g: Tensor,
    norm: Norm,
    numbers: RMSSettings,
    moment: Moment,
    into: Tensor | None,
) -> NormGradients | None:
    """Return the gradients of a batch norm, and take g in.

    Args:
        running: the site.
        g: dJ/dsigma.
        norm: the batch norm.
        numbers: of the site.
        moment: of the pass.
        into: where the input's gradient is to be written; None if it is not asked for.
    """
    x = norm.x
    known = (g.shape, g.stride(), g.dtype, x.stride(), x.dtype)
    fused = running.kernel("norm", known, lambda: prepare_norm(g, x, running.r, running.averaged))
    if fused is None:
        return None
    update = _count(running, numbers, moment)
    gradients: NormGradients
    gradients, running.norm = fused(g, norm, running.r, running.norm, update, into)
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
    fused = running.kernel("squares", known, lambda: prepare_squares(g, axis, is_summed=is_summed))
    return (None, None) if fused is None else fused(g)


def _count(running: Running, numbers: RMSSettings, moment: Moment) -> Update:
    """Count a pass that a kernel is to take in; the numbers of its factor."""
    running.rho, running.loss_scale = numbers.rho, moment.loss_scale
    running.elements += running.elements_of_pass
    running.samples += running.samples_of_pass
    rho, weight = (1.0, 0.0) if moment.stale else (running.rho, running.weight)
    return Update(rho, weight, numbers.scale, numbers.eps)
