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

import torch
from torch import Tensor

from virtualgrad.operators.base import Operator, apply_operator
from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.eager_means import EagerMeans
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients
from virtualgrad.operators.rms_compiled import InCompiledPass, refuse_subclass
from virtualgrad.operators.rms_fused import norm_gradients_fused, transform_fused
from virtualgrad.operators.rms_settings import RMSSettings, require_bools
from virtualgrad.operators.running import Running
from virtualgrad.sites import Site


class RMS(EagerMeans):
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

    Attributes:
        is_plain: whether T(g) is what this class makes of it; a subclass may make something else.
    """

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
        super().__init__(
            rho,
            stale=stale,
            unit_is_sample=per_sample and loss_reduction == "mean",
            share_positions=share_positions,
        )
        own = type(self)
        self.is_plain = own.__call__ is RMS.__call__ and own.transform is RMS.transform
        numbers = RMSSettings(scale, rho, eps)
        self.settings = settings or (lambda site: numbers)
        self.switches = {
            "per_sample": per_sample,
            "loss_reduction": loss_reduction,
            "share_positions": share_positions,
            "stale": stale,
        }

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return s g / sqrt(r + eps), and prepare the new r."""
        return self.transform(g, site, self.settings(site))

    def at(self, site: Site, sigma: Tensor) -> Operator:
        """As in Algorithm 1, with s, rho and eps as tensors: a change needs no compilation."""
        if not self.is_plain:
            refuse_subclass(type(self).__name__)
        return InCompiledPass(self, site, sigma)

    def transform(self, g: Tensor, site: Site, numbers: RMSSettings) -> Tensor:
        """Return T(g) with given numbers, and prepare the new r."""
        if self.learns_nothing(g):
            return g
        return self._take_in(g, site, numbers, None).g

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
        return self._take_in(g, site, self.settings(site), channels)

    def _take_in(
        self, g: Tensor, site: Site, numbers: RMSSettings, channels: Channels | None
    ) -> Incoming:
        """What a layer is to pull back for a g, whose square is added to what the site has got."""
        running = self._find(g, site)
        running.rho, running.loss_scale = numbers.rho, self.loss_scale
        if channels is not None and channels.rows and running.only_axis == channels.axis:
            return Incoming(g, *self._gather(running, g, numbers, channels))
        if running.view is None:
            return self._transformed(running, g, numbers, channels)
        counted = self._transformed(running, g.reshape(running.view), numbers, None)
        return Incoming(counted.g.view(g.shape))

    def _transformed(
        self, running: Running, g: Tensor, numbers: RMSSettings, channels: Channels | None
    ) -> Incoming:
        """The same for a g in the shape in which its axes are counted."""
        if running.fusible and self._is_alone(running):
            made = transform_fused(running, g, numbers, channels, stale=self.stale)
            if made is not None:
                return made
        factor, _ = self._gather(running, g, numbers)
        return Incoming(_product(g, factor, running))

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
        if running.view is not None or not running.fusible or not self._is_alone(running):
            return None
        numbers = self.settings(site)
        running.rho, running.loss_scale = numbers.rho, self.loss_scale
        return norm_gradients_fused(running, g, norm, numbers, into, stale=self.stale)

    def _is_alone(self, running: Running) -> bool:
        """Whether T at a site waits neither for the sums of all ranks nor for compiled passes."""
        return running.compiled is None and (self.stale or self.ranks is None)

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
        return _product(viewed, factor, running).view(g.shape)

    def same(self, g: Tensor, site: Site) -> Tensor:
        """Return T(g) of a g that is counted already, for another parameter of the site.

        By the r that is known by now; nothing is prepared.
        """
        if self.learns_nothing(g) or not self.is_plain:
            return self(g, site)
        running = self._find(g, site)
        factor = self._factor_of(running, self.settings(site))
        return _product(_viewed(g, running), factor, running).view(g.shape)


def _viewed(g: Tensor, running: Running) -> Tensor:
    """A tensor of sigma's shape, in the shape in which its axes are counted."""
    return g if running.view is None else g.reshape(running.view)


def _product(g: Tensor, factor: Tensor, running: Running) -> Tensor:
    """G times the factor of a site, in g's precision."""
    if running.broadcast_shape is not None:
        factor = factor.view(running.broadcast_shape)
    if factor.dtype == g.dtype:
        return g * factor
    # out=: one pass, computed in the factor's precision and rounded to g's once
    return torch.mul(g, factor, out=torch.empty_like(g))
