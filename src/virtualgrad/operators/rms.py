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
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from virtualgrad.operators.base import (
    StatefulOperator,
    accumulation_dtype,
    nonfinite_indices,
    require_shape,
)
from virtualgrad.sites import Layout, Site


def sum_of_squares(g: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sum of |g|^2 over some axes, in one pass over g, in float32 at least."""
    dtype = accumulation_dtype(g.dtype)
    if g.is_complex():
        return g.abs().to(dtype).square().sum(axes)
    norm: Tensor = torch.linalg.vector_norm(g, dim=axes, dtype=dtype)
    return norm.square()


def mean_square(total: Tensor, elements: int, unit: float) -> Tensor:
    """(unit^2 / elements) * total, where total = sum of g^2 over ``elements`` numbers."""
    return total * (unit * unit / elements)


def running_mean(r: Tensor, statistic: Tensor, rho: float) -> Tensor:
    """Return rho r + (1 - rho) * statistic."""
    return rho * r + (1 - rho) * statistic


def divisor(r: Tensor, eps: float) -> Tensor:
    """sqrt(r + eps)."""
    return torch.sqrt(r + eps)


@dataclass(frozen=True)
class RMSSettings:
    """The numbers of Algorithm 1 at one site: s, rho and eps."""

    scale: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6


@dataclass
class _Prepared:
    """What the backward calls since the last commit have brought to one site.

    ``total`` is the sum of g^2 over samples (and shared positions), or the sum of g itself where
    sigma has no sample axis; ``elements`` counts the numbers summed, ``samples`` is m.
    """

    layout: Layout
    total: Tensor
    elements: int
    samples: int
    rho: float
    updated: Tensor | None = None  # the new r, where T needed it already


class RMS(StatefulOperator):
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
        super().__init__()
        numbers = RMSSettings(scale, rho, eps)
        self.settings = settings or (lambda site: numbers)
        self.stale = stale
        self.share_positions = share_positions
        self.unit_is_sample = per_sample and loss_reduction == "mean"
        self._prepared: dict[str, _Prepared] = {}

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return s g / sqrt(r + eps), and prepare the new r."""
        if g.numel() == 0:  # an expert that got no rows: nothing to learn, nothing to divide
            return g
        numbers, layout = self.settings(site), self._layout(site)
        viewed = g.reshape(layout.view)
        r = self._committed(site.key, layout, g)
        prepared = self._gather(site.key, layout, viewed, numbers.rho)
        if not self.stale:
            prepared.updated = running_mean(r, self._statistic(prepared), numbers.rho)
        used = r if prepared.updated is None else prepared.updated
        factor = numbers.scale / divisor(used, numbers.eps)
        factor = _with_averaged_axes(factor, layout, self.share_positions)
        # out=: one pass, computed in the factor's precision and rounded to g's once.
        return torch.mul(viewed, factor, out=torch.empty_like(viewed)).reshape(g.shape)

    def commit(self) -> None:
        """Update r at every site that a backward pass has reached."""
        for key, prepared in self._prepared.items():
            kept = self.state.get(key, {}).get("r")
            new = prepared.updated
            if new is None:
                statistic = self._statistic(prepared)
                r = torch.zeros_like(statistic) if kept is None else kept.to(statistic.device)
                new = running_mean(r, statistic, prepared.rho)
            if kept is None or kept.device != new.device:
                self.state[key] = {"r": new}
            else:
                kept.copy_(new)  # in place: a captured CUDA graph replays into the same memory
        self.rollback()

    def rollback(self) -> None:
        """Forget what the backward calls since the last commit have brought."""
        self._prepared = {}

    def has_prepared(self) -> bool:
        """Whether a backward pass has reached a site since the last commit."""
        return bool(self._prepared)

    def nonfinite_sites(self) -> list[str]:
        """Keys of the sites where g was NaN or infinite, in the order of backward."""
        keys = list(self._prepared)
        totals = [prepared.total for prepared in self._prepared.values()]
        return [keys[index] for index in nonfinite_indices(totals)]

    def _layout(self, site: Site) -> Layout:
        """The site's layout; with all rows alike if its r was begun so (picked rows)."""
        kept, rows = self.state.get(site.key, {}).get("r"), site.layout.rows
        if kept is None or rows is None:
            return site.layout
        begun_with_rows = kept.shape == rows.state_shape(self.share_positions)
        return rows if begun_with_rows else site.layout

    def _committed(self, key: str, layout: Layout, g: Tensor) -> Tensor:
        """The r of the last commit; zeros for a new site."""
        shape = layout.state_shape(self.share_positions)
        kept = self.state.get(key, {}).get("r")
        if kept is None:
            return torch.zeros(shape, dtype=accumulation_dtype(g.dtype), device=g.device)
        require_shape(
            key,
            shape,
            kept.shape,
            "pass share_positions=True, which keeps one r per output channel for inputs of any "
            "size, or keep the size of the inputs fixed",
        )
        return kept.to(g.device)

    def _gather(self, key: str, layout: Layout, viewed: Tensor, rho: float) -> _Prepared:
        """Add this g to what the site has got since the last commit."""
        axes = layout.averaged_axes(self.share_positions)
        elements = prod(layout.view[axis] for axis in axes)
        if layout.sample_axis is not None:
            total = sum_of_squares(viewed, axes)
        else:
            total = viewed if viewed.is_complex() else viewed.to(accumulation_dtype(viewed.dtype))
        before = self._prepared.get(key)
        if before is not None:
            if layout.sample_axis is None:
                elements = 0  # more g of the same numbers, not more numbers
            total = before.total + total
            elements += before.elements
        samples = layout.samples + (0 if before is None else before.samples)
        prepared = _Prepared(layout, total, elements, samples, rho)
        self._prepared[key] = prepared
        return prepared

    def _statistic(self, prepared: _Prepared) -> Tensor:
        """The mean of g^2 that r follows, in the unit chosen."""
        layout = prepared.layout
        if layout.sample_axis is None:
            axes = layout.averaged_axes(self.share_positions)
            square = prepared.total.abs().square()
            return square.mean(axes) if axes else square
        unit = prepared.samples if self.unit_is_sample else 1
        return mean_square(prepared.total, prepared.elements, unit)


def _with_averaged_axes(r: Tensor, layout: Layout, share_positions: bool) -> Tensor:
    """View r so that it broadcasts against g: size 1 in place of every averaged axis."""
    averaged = layout.averaged_axes(share_positions)
    return r.reshape([1 if axis in averaged else n for axis, n in enumerate(layout.view)])
