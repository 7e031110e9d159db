"""The running means of SVGD as eager passes find them, add to them, and take T's factor from them.

What a pass brings is kept beside r (:mod:`.running`) until a step commits it
(:mod:`.running_means`).
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.channels import Channels
from virtualgrad.operators.rms_fused import root_of_squares_fused
from virtualgrad.operators.rms_settings import (
    RMSSettings,
    factor_by,
    require_same_shape,
    warn_of_both_kinds,
)
from virtualgrad.operators.running import Running
from virtualgrad.operators.running_means import RunningMeans
from virtualgrad.operators.statistic import accumulated, root_of_squares, squares_added
from virtualgrad.sites import Layout, Site


class EagerMeans(RunningMeans):
    """An operator whose eager passes bring g^2 to a running mean r at each site.

    Args:
        rho: decay of r.
        stale: whether T goes by the r of before this step.
        unit_is_sample: whether g is taken for the gradient of one sample's loss.
        share_positions: whether r is averaged over positions too.
    """

    loss_scale: float = 1.0

    def __init__(
        self, rho: float, *, stale: bool, unit_is_sample: bool, share_positions: bool
    ) -> None:
        super().__init__(rho, stale=stale, unit_is_sample=unit_is_sample)
        self.share_positions = share_positions

    def layout_at(self, site: Site) -> Layout:
        """The site's layout; with all rows alike if its r was begun so (picked rows)."""
        rows = site.layout.rows
        if rows is None:
            return site.layout
        begun_with_rows = self.sites.shape_of(site.key) == rows.state_shape(self.share_positions)
        return rows if begun_with_rows else site.layout

    def _find(self, g: Tensor, site: Site) -> Running:
        """What is kept for a site that an eager pass has come to."""
        running = self.sites.kept.get(site.key)
        if running is None or running.site is not site or running.device != g.device:
            return self._begin(g, site)
        return running

    def _begin(self, g: Tensor, site: Site) -> Running:
        """What is kept for a site that is new, or that has another shape than before."""
        layout = self.layout_at(site)
        known = self.sites.kept.get(site.key)
        if known is not None and known.is_of_all and layout.is_of_one_sample:
            layout = layout.without_samples()
        viewed = g.reshape(layout.view)
        axes = layout.averaged_axes(self.share_positions)
        like = viewed[tuple(0 if axis in axes else slice(None) for axis in range(viewed.dim()))]
        running = self.sites.find_or_begin(site.key, like, g.dtype)
        require_same_shape(site.key, like.shape, running.r.shape, shared=self.share_positions)
        running.site = site
        running.plain = running.plain_tried = None  # it was for another one
        running.view = None if layout.view == tuple(g.shape) else layout.view
        running.averaged = axes
        sampled = layout.sample_axis is not None
        if running.elements and running.sampled != sampled:
            warn_of_both_kinds(site.key)
        running.sampled = sampled
        running.elements_of_pass = prod(layout.view[axis] for axis in axes)
        running.samples_of_pass = layout.samples
        # An r of one sample's shape broadcasts by itself. But one of no axes must get some, or
        # torch takes no notice of it where it chooses the precision of a product.
        beside = layout.broadcast_shape(self.share_positions)
        running.broadcast_shape = None if axes == (0,) and like.dim() > 0 else beside
        running.unit_is_sample = self.unit_is_sample
        running.fusible = running.sampled and kernels.may_launch(g.device)
        kept = [axis for axis in range(viewed.dim()) if axis not in axes]
        running.only_axis = kept[0] if len(kept) == 1 and running.view is None else None
        return running

    def _gather(
        self,
        running: Running,
        g: Tensor,
        numbers: RMSSettings,
        channels: Channels | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Add g to what the site has got since the last commit; s / sqrt(r + eps).

        And the sum of g over all axes but the channels', if a layer wants it and it comes with it.
        """
        if running.compiled is not None:  # eager and compiled passes in turn: one way of counting
            counts = (running.elements_of_pass, running.samples_of_pass)
            running.compiled.add(
                g,
                running.averaged,
                counts=counts if running.sampled else None,
                rho=numbers.rho,
                loss_scale=self.loss_scale,
                unit_is_sample=self.unit_is_sample,
            )
            return self._factor_of(running, numbers), None
        now = None if self.stale else self.ranks  # T needs the new r of all ranks
        total = None
        if running.sampled:
            norm = None
            if running.fusible:
                norm, total = root_of_squares_fused(running, g, channels)
            if norm is None:
                norm = root_of_squares(g, running.averaged)
            elements, samples = running.elements_of_pass, running.samples_of_pass
            if now is not None:
                norm, elements, samples = now.sum_pass(norm, elements, samples)
            running.add_samples(norm, elements, samples)
        else:
            gradient = accumulated(g)
            running.add_gradient(gradient if now is None else now.mean(gradient))
        return self._factor_of(running, numbers), total

    def _gather_again(
        self, running: Running, g: Tensor, earlier: Tensor, numbers: RMSSettings
    ) -> Tensor:
        """Add g to what the same samples have brought before; s / sqrt(r + eps)."""
        squares = squares_added(g, earlier, running.averaged)
        if running.compiled is not None:
            running.compiled.add_to_last(
                squares / self.loss_scale**2, rho=numbers.rho, unit_is_sample=self.unit_is_sample
            )
            return self._factor_of(running, numbers)
        if self.ranks is not None and not self.stale:  # so is what was added up before
            squares = self.ranks.sum_squares(squares)
        running.add_to_last(squares)
        return self._factor_of(running, numbers)

    def _factor_of(self, running: Running, numbers: RMSSettings) -> Tensor:
        """S / sqrt(r + eps), r of before or updated."""
        if running.compiled is not None:
            return factor_by(running.r if self.stale else running.compiled.candidate, numbers)
        if not self.stale:
            factor = running.updated().add_(numbers.eps).rsqrt_()
            return factor if numbers.scale == 1 else factor.mul_(numbers.scale)
        wanted = (numbers.scale, numbers.eps)
        if running.factor is None or running.factor_of != wanted:
            running.factor = (running.r + numbers.eps).rsqrt_().mul_(numbers.scale)
            running.factor_of = wanted
        return running.factor
