r"""SVGD's statistic over several processes (ranks) that share a batch.

Data parallel training minimises J = (1/W) sum over W ranks of J_rank, so the g of J is 1/W times
that of a rank, and what one process with the whole batch would have gathered is

    sum of g^2 = (1/W^2) * sum over ranks of (sum of g_rank^2),    e = sum of e_rank, m of m_rank

and, where sigma has no sample axis, g = (1/W) * sum over ranks of g_rank. With the r of before the
step this is reduced once per step, all sites in one buffer. With r updated first T needs the new r
in the backward pass, and every site is reduced there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from virtualgrad.operators.running import Running


@dataclass(frozen=True, order=True)
class Agreed:
    """What all ranks know of a site: its key, and the shapes of what is reduced for it."""

    key: str
    state_shape: tuple[int, ...]
    gradient_shape: tuple[int, ...] | None
    dtype: str
    rho: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is reduced."""
        return self.state_shape if self.gradient_shape is None else self.gradient_shape


class Ranks:
    """The processes that share a batch.

    Args:
        group: their process group.
        device: where the model lies.
        divisor: W of the above; 1 where g has been divided by it already.
    """

    def __init__(self, group: Any, device: torch.device, divisor: int | None = None) -> None:
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group)
        self.divisor = self.size if divisor is None else divisor
        self.agreed: list[Agreed] = []

    # ---------------------------------------------------------------- in the backward pass

    def sum_pass(self, norm: Tensor, elements: int, samples: int) -> tuple[Tensor, int, int]:
        """What one pass brings to a site on all ranks; all of them must come here."""
        counts = norm.new_tensor([elements, samples])
        flat = torch.cat((norm.square().flatten(), counts))
        dist.all_reduce(flat, group=self.group)
        summed = flat[:-2].view(norm.shape).sqrt_().div_(self.divisor)
        e, m = flat[-2:].tolist()
        return torch.empty_like(norm).copy_(summed), round(e), round(m)

    def mean(self, gradient: Tensor) -> Tensor:
        """The same for a g without a sample axis."""
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        real = real.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(real, group=self.group)
        real.div_(self.divisor)
        return torch.view_as_complex(real) if gradient.is_complex() else real

    # ---------------------------------------------------------------- in the step

    def sum_all(self, sites: dict[str, Running]) -> None:
        """Make what was gathered since the last commit that of all ranks, in one buffer."""
        counts = self._sum_counts(sites)
        if counts[0]:  # some rank has met a site that not all know of
            self._agree(sites)
            counts = self._sum_counts(sites)
        total = dict(zip(self.agreed, zip(counts[1::2], counts[2::2], strict=True), strict=True))
        reached = [site for site in self.agreed if total[site][0]]
        for name in sorted({site.dtype for site in reached}):
            group = [site for site in reached if site.dtype == name]
            parts = [self._contribution(site, sites.get(site.key)) for site in group]
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=self.group)
            sizes = [part.numel() for part in parts]
            for site, summed in zip(group, flat.split(sizes), strict=True):
                running = sites.get(site.key)
                if running is None:
                    r = torch.zeros(site.state_shape, dtype=summed.real.dtype, device=self.device)
                    running = sites[site.key] = Running(r, committed=False)
                    running.rho = site.rho
                self._take(running, site, summed, *total[site])

    def _sum_counts(self, sites: dict[str, Running]) -> list[int]:
        """(sites that are new somewhere, then e and m of every site that all know of)."""
        known = {site.key for site in self.agreed}
        reached = {key: running for key, running in sites.items() if running.elements}
        # A layer that got no rows of this rank's batch was still part of it.
        batch = max((running.samples for running in reached.values()), default=0)
        numbers = [sum(key not in known for key in reached)]
        for site in self.agreed:
            running = reached.get(site.key)
            numbers += [0, batch] if running is None else [running.elements, running.samples]
        counts = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=self.group)
        return [int(number) for number in counts.tolist()]

    def _agree(self, sites: dict[str, Running]) -> None:
        mine = [_describe(key, running) for key, running in sites.items() if running.elements]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        found = {site.key: site for site in self.agreed}
        for theirs in everyone:
            found |= {site.key: site for site in theirs}
        self.agreed = [found[key] for key in sorted(found)]

    def _contribution(self, site: Agreed, running: Running | None) -> Tensor:
        """What this rank adds: its sum of squares, or of g; zeros if it did not reach the site."""
        if running is not None and running.norm is not None:
            return running.norm.square()
        if running is not None and running.gradient is not None:
            return running.gradient
        return torch.zeros(site.shape, dtype=getattr(torch, site.dtype), device=self.device)

    def _take(
        self, running: Running, site: Agreed, summed: Tensor, elements: int, samples: int
    ) -> None:
        summed = summed.view(site.shape)
        if site.gradient_shape is None:
            running.norm = torch.empty_like(running.r).copy_(summed.sqrt_().div_(self.divisor))
            running.elements, running.samples = elements, samples
        else:
            running.gradient, running.elements = summed / self.divisor, 1


def _describe(key: str, running: Running) -> Agreed:
    gradient = running.gradient
    dtype = running.r.dtype if gradient is None else gradient.dtype
    return Agreed(
        key,
        tuple(running.r.shape),
        None if gradient is None else tuple(gradient.shape),
        str(dtype).removeprefix("torch."),
        float(running.rho),
    )
