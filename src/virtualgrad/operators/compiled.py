r"""T of SVGD in a compiled pass: no host, and memory that stays where it is.

A compiled pass writes the new r itself, the *candidate*, beside r, and counts in a tensor:

    candidate = rho r + (1 - rho) (u^2 / e) * sum of g^2

(symbols as in :mod:`.running`). Where a second pass comes before the commit (gradient
accumulation), it recovers the sum of the first one from the candidate and the counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.statistic import accumulated, mean_square, sum_of_squares

ROWS_OF_COUNTS = 1024
"""Sites that count in one tensor."""


class Compiled:
    """What compiled passes keep of a site.

    Attributes:
        candidate: what the next commit makes of r; r itself if no pass has reached the site.
        counts: (e, m) since the last commit, a row for each of many sites: a compiler makes one
            kernel of all the counting in one tensor, but one per site of many tensors.
        zeros: what counts are set to.
        row: this site's.
        gradient: as in :class:`~virtualgrad.operators.running.Running`.
    """

    def __init__(
        self, r: Tensor, gradient: Tensor | None, counts: tuple[Tensor, Tensor], row: int
    ) -> None:
        self.r = r
        self.candidate = r.clone()
        self.counts, self.zeros = counts
        self.row = row
        self.gradient = gradient
        for tensor in (r, self.candidate, gradient):
            if tensor is not None:
                keep_static(tensor)

    def counted(self) -> tuple[int, int]:
        """(e, m) since the last commit; the host waits for them."""
        elements, samples = self.counts[self.row].tolist()
        return round(elements), round(samples)

    def add(
        self,
        g: Tensor,
        axes: tuple[int, ...],
        *,
        counts: tuple[int, int] | None,
        rho: Any,
        loss_scale: Any,
        unit_is_sample: bool,
    ) -> None:
        """Take in g, averaged over some axes; ``counts`` (e, m) is None where it has no samples."""
        if counts is None:
            self.add_gradient(accumulated(g) / loss_scale, axes, rho=rho)
        else:
            squares = sum_of_squares(g, axes) / loss_scale**2
            self.add_samples(squares, *counts, rho=rho, unit_is_sample=unit_is_sample)

    def add_samples(
        self, squares: Tensor, elements: int, samples: int, *, rho: Any, unit_is_sample: bool
    ) -> None:
        """Take in the sum of g^2 over ``elements`` numbers of ``samples`` samples."""
        e_before, m_before = self.counts[self.row, 0], self.counts[self.row, 1]
        e, m = e_before + elements, m_before + samples
        unit, unit_before = (m, m_before.clamp(min=1)) if unit_is_sample else (1, 1)
        earlier = (self.candidate - rho * self.r) * (e_before / (unit_before**2 * (1 - rho)))
        total = squares + torch.where(e_before > 0, earlier, 0)
        self.candidate.copy_(rho * self.r + (1 - rho) * (unit * unit / e) * total)
        self.counts[self.row, 0] = e
        self.counts[self.row, 1] = m

    def add_gradient(self, g: Tensor, averaged: tuple[int, ...], *, rho: Any) -> None:
        """Take in a g without a sample axis."""
        assert self.gradient is not None
        self.gradient.add_(g)
        self.counts[self.row] += 1  # reached
        statistic = mean_square(self.gradient, averaged)
        self.candidate.copy_(rho * self.r + (1 - rho) * statistic)


def make_counts(r: Tensor) -> tuple[Tensor, Tensor]:
    """Counts for some sites whose r are like this one, and the zeros that they are set to.

    They have r's dtype, so that one launch can copy both (e is exact in float32 up to 2^24, and
    then to seven digits).
    """
    counts, zeros = r.new_zeros(ROWS_OF_COUNTS, 2), r.new_zeros(ROWS_OF_COUNTS, 2)
    keep_static(counts)
    return counts, zeros


def keep_static(tensor: Tensor) -> None:
    """Tell the compiler that a tensor stays where it is, and keeps its size."""
    torch._dynamo.mark_static_address(tensor)
    torch._dynamo.mark_static(tensor)
