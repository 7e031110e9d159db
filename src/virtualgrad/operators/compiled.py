r"""T of SVGD in a compiled pass: no host, and memory that stays where it is.

A compiled pass writes the new r itself, the *candidate*, beside r, and counts in a tensor:

    candidate = rho r + (1 - rho) (u^2 / e) * sum of g^2

(symbols as in :mod:`.running`). Where a second pass comes before the commit (gradient
accumulation), it recovers the sum of the first one from the candidate and the counts.

**A second pass through the same graph** (``retain_graph``) is a part of the same gradient, not a
micro-batch: the statistic is that of the sum, whose products g_1 g_2 only one who has kept all of
g_1 can tell. A compiled pass that kept it would pay for it at every step. So it is noticed, and
refused (:mod:`.counts`).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, arange, maximum, where

from virtualgrad.operators.copies import CopyIfCounted, prepare_copy
from virtualgrad.operators.counts import Graphs, keep_static
from virtualgrad.operators.rms_op import Kept
from virtualgrad.operators.statistic import (
    accumulated,
    mean_square,
    sum_of_columns,
    sum_of_squares,
)

LARGE = 2**20  # numbers; torch's copies of many tensors at once reach half of an H200's bandwidth

SumOrder = Literal["at once", "columns"]
"""How a compiler is to sum squares: as it likes, or samples (the first axis) first."""


class Compiled:
    """What compiled passes keep of a site.

    Attributes:
        candidate: what the next commit makes of r; r itself if no pass has reached the site.
        graphs: the numbers of the graphs that passes go through.
        counts: (e, m, last) since the last commit, last being the number of the last graph. They
            have r's dtype, so that one launch can copy both (e is exact in float32 up to 2^24, and
            then to seven digits).
        gradient: as in :class:`~virtualgrad.operators.running.Running`.
        restoring: copies r into the candidate if a pass was counted; of a large one on a GPU.
        is_written: whether the host has written the candidate, of which nothing may be counted.
    """

    # No __dict__, in which a compiler would look for each method, at every call of the model.
    __slots__ = ("candidate", "counts", "gradient", "graphs", "is_written", "r", "restoring")

    def __init__(self, r: Tensor, gradient: Tensor | None, graphs: Graphs) -> None:
        self.r = r
        self.candidate = r.clone()
        self.graphs = graphs
        self.is_written = False
        self.counts = graphs.zeros.clone()
        self.gradient = gradient
        for tensor in (r, self.candidate, self.counts, gradient):
            if tensor is not None:
                keep_static(tensor)
        self.restoring: CopyIfCounted | None = None
        if r.numel() >= LARGE:
            self.restoring = prepare_copy(self.candidate, r, self.counts)

    def counted(self) -> tuple[int, int]:
        """(e, m) since the last commit; the host waits for them."""
        elements, samples, _ = self.counts.tolist()
        return round(elements), round(samples)

    def has_counted_twice(self) -> bool:
        """Whether two passes through one graph have come since the last commit; the host waits."""
        return bool(self.counts[2].isnan())

    def add(
        self,
        g: Tensor,
        axes: tuple[int, ...],
        *,
        counts: tuple[int, int] | None,
        rho: Any,
        loss_scale: Any,
        unit_is_sample: bool,
        graph: Tensor | None = None,
        by: SumOrder = "at once",
    ) -> Tensor:
        """Take in g, averaged over some axes; the new r, as T goes by it.

        It is a number also where the candidate is NaN (:mod:`.counts`): a GradScaler would skip a
        step with such gradients before anyone could ask for the reason.

        Args:
            g: of one pass.
            axes: the axes.
            counts: (e, m) of the pass; None where sigma has no samples.
            rho: decay of r.
            loss_scale: the factor of the loss.
            unit_is_sample: whether g is to be that of one sample's loss.
            graph: the number of the pass's graph, thrice (:mod:`.counts`), where nobody else knows
                whether it is the first pass through it. (Without samples g is added up: any number
                of passes will do.)
            by: how the squares are to be summed.
        """
        if counts is None:
            self.add_gradient(accumulated(g) / loss_scale, axes, rho=rho)
            return self.candidate
        total = sum_of_squares(g, axes) if by == "at once" else sum_of_columns(g, axes)
        squares = total / loss_scale**2
        return self.add_samples(
            squares, *counts, rho=rho, unit_is_sample=unit_is_sample, graph=graph
        )

    def add_samples(
        self,
        squares: Tensor,
        elements: int,
        samples: int,
        *,
        rho: Any,
        unit_is_sample: bool,
        graph: Tensor | None = None,
    ) -> Tensor:
        """Take in the sum of g^2 over ``elements`` numbers of ``samples`` samples."""
        before = self.counts
        e_before, m_before = before[0], before[1]
        e, m = e_before + elements, m_before + samples
        unit, unit_before = (m, m_before.clamp(min=1)) if unit_is_sample else (1, 1)
        earlier = (self.candidate - rho * self.r) * (e_before / (unit_before**2 * (1 - rho)))
        is_new = None if graph is None else graph[2] > before[2]
        has_earlier = e_before > 0 if is_new is None else (e_before > 0) & is_new
        total = squares + where(has_earlier, earlier, 0)
        updated: Tensor = rho * self.r + (1 - rho) * (unit * unit / e) * total
        self.candidate.copy_(updated if is_new is None else where(is_new, updated, math.nan))
        self.count(elements, samples, graph)
        return updated

    def for_op(
        self,
        numbers: Tensor,
        graph: Tensor,
        *,
        counts: tuple[int, int],
        stale: bool,
        unit_is_sample: bool,
    ) -> Kept:
        """What an op (:mod:`.rms_op`) needs that takes in a g; :meth:`count` is to follow it."""
        kept = (self.r, self.candidate, self.counts, graph, numbers)
        return Kept(*kept, *counts, stale, unit_is_sample)

    def count(self, elements: int, samples: int, graph: Tensor | None) -> None:
        """Count a pass; all three numbers by one kernel."""
        before = self.counts
        place = arange(3, device=before.device)
        counted = before + where(place == 0, elements, samples)
        latest = before if graph is None else where(graph > before, graph, math.nan)
        self.counts.copy_(where(place == 2, latest, counted))

    def add_to_last(self, squares: Tensor, *, rho: Any, unit_is_sample: bool) -> None:
        """Add to the sum of squares of samples that are counted already."""
        e, m = self.counts[0], self.counts[1]
        unit = m if unit_is_sample else 1
        added = (1 - rho) * (unit * unit / e) * squares
        self.candidate.copy_(maximum(self.candidate + added, rho * self.r))

    def add_gradient(self, g: Tensor, averaged: tuple[int, ...], *, rho: Any) -> None:
        """Take in a g without a sample axis."""
        assert self.gradient is not None
        self.gradient.add_(g)
        self.counts.add_(1)  # reached
        statistic = mean_square(self.gradient, averaged)
        self.candidate.copy_(rho * self.r + (1 - rho) * statistic)
