r"""The operator of SVGD (Algorithm 1): divide g by its running root mean square.

    r <- rho r + (1 - rho) * (1/m) sum over samples tau of (g_tau)^2
    T(g) = s g / sqrt(r + eps)

with a number r for every element of sigma but the sample axis. ``scale`` is s.

**Units.** Algorithm 1 writes g_tau for the gradient of *one sample's* loss. Of a loss that is the
mean over m samples, autograd delivers g = g_tau / m. As T is linear in g once r is known, the
factor m cancels in (1/m) sum T(g_tau) and survives only in the statistic:

    per sample, mean loss:    (1/m) sum (m g)^2 = m sum g^2
    per batch, or a sum loss: (1/m) sum g^2

so ``per_sample`` only chooses the unit of r (and thereby what eps and s are worth).

**Several backward calls before one step** (gradient accumulation) add up sum g^2 and m, so that r
is what one large batch would have given. The T of all but the last of them is that of the large
batch only with ``stale=True``; otherwise each divides by the r that was known by then.

**No sample axis** (position embeddings, a product of two weights): g is the gradient of the whole
loss already; it is added up over backward calls, and its square is the statistic.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.base import Operator, apply_operator
from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients
from virtualgrad.operators.rms_compiled import InCompiledPass, refuse_subclass
from virtualgrad.operators.rms_fused import (
    Moment,
    norm_gradients_fused,
    root_of_squares_fused,
    transform_fused,
    weight_gradient_fused,
)
from virtualgrad.operators.rms_settings import (
    RMSSettings,
    factor_by,
    require_bools,
    require_same_shape,
    warn_of_both_kinds,
)
from virtualgrad.operators.running import Running
from virtualgrad.operators.running_means import RunningMeans
from virtualgrad.operators.statistic import accumulated, root_of_squares, squares_added
from virtualgrad.sites import Layout, Site


class RMS(RunningMeans):
    """T(g) = s g / sqrt(r + eps), r a running mean of g^2 over the batch (Algorithm 1).

    Args:
        scale: s.
        rho: decay of r.
        eps: added to r under the root.
        per_sample: take g as the gradient of one sample's loss (Algorithm 1 as printed); False:
            of the batch's loss, as autograd delivers it (the released code).
        stale: divide by the r of before this step (the released code); False: update r first.
        share_positions: one r per parameter axis only, averaged over positions too.
        loss_reduction: ``"mean"`` or ``"sum"`` over the samples.
        settings: the numbers at a given site, where they differ from site to site; it overrides
            ``scale``, ``rho`` and ``eps``.
    """

    loss_scale: float = 1.0

    def __init__(
        self,
        scale: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        *,
        per_sample: bool = True,
        stale: bool = False,
        share_positions: bool = False,
        loss_reduction: str = "mean",
        settings: Callable[[Site], RMSSettings] | None = None,
    ) -> None:
        require_bools(per_sample=per_sample, stale=stale, share_positions=share_positions)
        super().__init__(rho, stale=stale, unit_is_sample=per_sample and loss_reduction == "mean")
        numbers = RMSSettings(scale, rho, eps)
        self.settings = settings or (lambda site: numbers)
        self.share_positions = share_positions
        self.switches = {
            "per_sample": per_sample,
            "loss_reduction": loss_reduction,
            "share_positions": share_positions,
            "stale": stale,
        }

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return s g / sqrt(r + eps), and prepare the new r."""
        return self.transform(g, site, self.settings(site))

    @property
    def is_plain(self) -> bool:
        """Whether T(g) is what this class makes of it; a subclass may make something else."""
        own = type(self)
        return own.__call__ is RMS.__call__ and own.transform is RMS.transform

    def at(self, site: Site, sigma: Tensor) -> Operator:
        """As in Algorithm 1, with s, rho and eps as tensors: a change needs no compilation."""
        if not self.is_plain:
            refuse_subclass(type(self).__name__)
        return InCompiledPass(self, site, sigma)

    def transform(self, g: Tensor, site: Site, numbers: RMSSettings) -> Tensor:
        """Return T(g) with given numbers, and prepare the new r."""
        if self.learns_nothing(g):
            return g
        return self._product_at(self._find(g, site), g, numbers).g

    def _product_at(
        self,
        running: Running,
        g: Tensor,
        numbers: RMSSettings,
        channels: Channels | None = None,
    ) -> Incoming:
        viewed = _viewed(g, running)
        if self._may_fuse(running):
            counted, moment = channels if running.view is None else None, self._moment
            made = None
            if counted is not None and counted.convolved is not None:
                made = weight_gradient_fused(running, g, numbers, moment, counted)
            if made is None:
                made = transform_fused(running, viewed, numbers, moment, counted)
            if made is not None:
                return made if running.view is None else Incoming(made.g.view(g.shape))
        factor, _ = self._gather(running, viewed, numbers)
        # An r of one sample's shape broadcasts by itself. But one of no axes must get some, or
        # torch takes no notice of it where it chooses the precision of a product.
        if running.averaged != (0,) or factor.dim() == 0:
            factor = factor.view(running.broadcast_shape)
        product = _product(viewed, factor)
        return Incoming(product if running.view is None else product.view(g.shape))

    def learns_nothing(self, g: Tensor) -> bool:
        """Whether g is of an expert that got no rows: nothing to learn, nothing to divide."""
        return g.numel() == 0 and (self.stale or self.ranks is None)

    def for_layer(self, g: Tensor, site: Site, channels: Channels | None) -> Incoming:
        """Return T(g), or g and f where T(g) is f g, and prepare the new r.

        f has one number per channel: it is returned where r differs along no other axis, unless a
        subclass makes something else of T(g).
        """
        if g.numel() == 0 or not self.is_plain:
            return Incoming(apply_operator(self, g, site))
        running, numbers = self._find(g, site), self.settings(site)
        if channels is not None and channels.rows and running.only_axis == channels.axis:
            return Incoming(g, *self._gather(running, g, numbers, channels))
        return self._product_at(running, g, numbers, channels)

    def norm_gradients(
        self, g: Tensor, site: Site, norm: Norm, *, into: Tensor | None
    ) -> NormGradients | None:
        """Return the gradients of a batch norm, weight's and bias' under T; prepare the new r.

        By kernels of a GPU that never make T(g); None, and nothing is prepared, where there are
        none for this g, or where a subclass makes something else of T(g).

        Args:
            g: dJ/dsigma.
            site: where.
            norm: the batch norm.
            into: where the input's gradient is to be written, that of the true g; it may be g
                itself. None if it is not asked for.
        """
        if g.numel() == 0 or not self.is_plain:
            return None
        running = self._find(g, site)
        if running.view is not None or not self._may_fuse(running):
            return None
        numbers = self.settings(site)
        return norm_gradients_fused(running, g, norm, numbers, self._moment, into)

    def _may_fuse(self, running: Running) -> bool:
        """Whether a kernel may make T at a site: it does not wait for the sums of all ranks."""
        alone = self.stale or self.ranks is None
        return running.fusible and alone and running.compiled is None

    @property
    def _moment(self) -> Moment:
        return Moment(self.stale, self.loss_scale)

    def again(self, g: Tensor, earlier: Tensor, site: Site) -> Tensor:
        """Return T(g) of a further pass through a graph that has brought ``earlier`` already.

        The two are parts of one gradient, not those of two micro-batches: r gets the square of
        their sum, in place of the square of the first, and no sample is counted twice.
        """
        if self.learns_nothing(g) or not self.is_plain:
            return self(g, site)
        numbers = self.settings(site)
        running = self._find(g, site)
        if not running.sampled:  # g is added up in any case
            return self.transform(g, site, numbers)
        viewed, before = _viewed(g, running), _viewed(earlier, running)
        factor = self._gather_again(running, viewed, before, numbers)
        return _product(viewed, factor.view(running.broadcast_shape)).view(g.shape)

    def same(self, g: Tensor, site: Site) -> Tensor:
        """Return T(g) of a g that is counted already, for another parameter of the site.

        By the r that is known by now; nothing is prepared.
        """
        if self.learns_nothing(g) or not self.is_plain:
            return self(g, site)
        running = self._find(g, site)
        factor = self._factor_of(running, self.settings(site)).view(running.broadcast_shape)
        return _product(_viewed(g, running), factor).view(g.shape)

    def _find(self, g: Tensor, site: Site) -> Running:
        """What is kept for a site that an eager pass has come to."""
        running = self.sites.kept.get(site.key)
        if running is None or running.site is not site or running.r.device != g.device:
            running = self._begin(g, site)
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
        running.view = None if layout.view == tuple(g.shape) else layout.view
        running.averaged = axes
        sampled = layout.sample_axis is not None
        if running.elements and running.sampled != sampled:
            warn_of_both_kinds(site.key)
        running.sampled = sampled
        running.elements_of_pass = prod(layout.view[axis] for axis in axes)
        running.samples_of_pass = layout.samples
        running.broadcast_shape = layout.broadcast_shape(self.share_positions)
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
        running.rho, running.loss_scale = numbers.rho, self.loss_scale
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

    def layout_at(self, site: Site) -> Layout:
        """The site's layout; with all rows alike if its r was begun so (picked rows)."""
        rows = site.layout.rows
        if rows is None:
            return site.layout
        begun_with_rows = self.sites.shape_of(site.key) == rows.state_shape(self.share_positions)
        return rows if begun_with_rows else site.layout


def _viewed(g: Tensor, running: Running) -> Tensor:
    """A tensor of sigma's shape, in the shape in which its axes are counted."""
    return g if running.view is None else g.reshape(running.view)


def _product(g: Tensor, factor: Tensor) -> Tensor:
    if factor.dtype == g.dtype:
        return g * factor
    # out=: one pass, computed in the factor's precision and rounded to g's once
    return torch.mul(g, factor, out=torch.empty_like(g))
