r"""SVGD's statistic over several processes (ranks) that share a batch.

Data parallel training minimises J = (1/W) sum over W ranks of J_rank, so the g of J is 1/W times
that of a rank, and what one process with the whole batch would have gathered is

    sum of g^2 = (1/W^2) * sum over ranks of (sum of g_rank^2),    e = sum of e_rank, m of m_rank

and, where sigma has no sample axis, g = (1/W) * sum over ranks of g_rank. With the r of before the
step this is reduced once per step, all sites in one buffer (:mod:`.reduction`). It is begun in
step(), as until then another backward pass may add to it, and waited for when the step has nothing
else to do before it may write. With r updated first T needs the new r in the backward pass, and
every site is reduced, and waited for, there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from virtualgrad.operators.reduction import Reduction
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


@dataclass(frozen=True)
class Gathering:
    """What the ranks have gathered at the sites that all knew of, on its way."""

    agreed: Sequence[Agreed]
    reduction: Reduction

    def wait(self) -> tuple[list[int], list[Tensor]]:
        """The sums over all ranks of :meth:`Ranks._counts`, and of what each site has gathered."""
        digits, summed = self.reduction.wait()
        return _from_digits(digits), summed


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

    def sum_squares(self, squares: Tensor) -> Tensor:
        """What a further pass adds to a sum of squares on all ranks; all of them must come here."""
        summed = squares.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed.div_(self.divisor**2)

    def mean(self, gradient: Tensor) -> Tensor:
        """The same for a g without a sample axis."""
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        real = real.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(real, group=self.group)
        real.div_(self.divisor)
        return torch.view_as_complex(real) if gradient.is_complex() else real

    # ---------------------------------------------------------------- in the step

    def begin(self, sites: dict[str, Running]) -> Gathering:
        """Begin to add up what was gathered since the last commit, in one buffer; do not wait."""
        numbers = _as_digits(self._counts(sites))
        return Gathering(
            self.agreed, Reduction(numbers, self._contributions(sites), self.group, self.device)
        )

    def finish(self, sites: dict[str, Running], gathering: Gathering) -> None:
        """Wait for that, and make it what was gathered; no pass may have come in between."""
        counts, summed = gathering.wait()
        if counts[0]:  # some rank has met a site that not all know of
            self._agree(sites)
            gathering = self.begin(sites)
            counts, summed = gathering.wait()
        taken: list[tuple[Running, Tensor]] = []
        reached = zip(gathering.agreed, summed, counts[1::2], counts[2::2], strict=True)
        for site, total, elements, samples in reached:
            if not elements:  # by nobody
                continue
            running = sites.get(site.key)
            if running is None:
                dtype = getattr(torch, site.dtype).to_real()
                r = torch.zeros(site.state_shape, dtype=dtype, device=self.device)
                running = sites[site.key] = Running(r, committed=False)
                running.rho = site.rho
            if site.gradient_shape is None:
                running.elements, running.samples = elements, samples
                taken.append((running, total.view(site.shape)))
            else:
                self._take_gradient(running, site, total)
        self._take_norms(taken)

    def sum_all(self, sites: dict[str, Running]) -> None:
        """Make what was gathered since the last commit that of all ranks, in one buffer."""
        self.finish(sites, self.begin(sites))

    def _counts(self, sites: dict[str, Running]) -> list[int]:
        """(sites that are new here, then e and m of every site that all know of)."""
        known = {site.key for site in self.agreed}
        reached = {key: running for key, running in sites.items() if running.elements}
        # A layer that got no rows of this rank's batch was still part of it.
        batch = max((running.samples for running in reached.values()), default=0)
        numbers = [sum(key not in known for key in reached)]
        for site in self.agreed:
            running = reached.get(site.key)
            numbers += [0, batch] if running is None else [running.elements, running.samples]
        return numbers

    def _agree(self, sites: dict[str, Running]) -> None:
        mine = [_describe(key, running) for key, running in sites.items() if running.elements]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        found = {site.key: site for site in self.agreed}
        for theirs in everyone:
            found |= {site.key: site for site in theirs}
        self.agreed = [found[key] for key in sorted(found)]

    def _contributions(self, sites: dict[str, Running]) -> list[Tensor]:
        """What this rank adds at every agreed site: its sum of squares, or of g."""
        found = [sites.get(site.key) for site in self.agreed]
        norms = [None if running is None else running.norm for running in found]
        known = [norm for norm in norms if norm is not None]
        squares = iter(torch._foreach_mul(known, known) if known else ())
        return [
            self._gradient(site, running) if norm is None else next(squares)
            for site, running, norm in zip(self.agreed, found, norms, strict=True)
        ]

    def _gradient(self, site: Agreed, running: Running | None) -> Tensor:
        """The sum of g at a site without samples; zeros if this rank did not reach the site."""
        gradient = None if running is None else running.gradient
        if gradient is None:
            dtype = getattr(torch, site.dtype)
            gradient = torch.zeros(site.shape, dtype=dtype, device=self.device)
        return torch.view_as_real(gradient) if gradient.is_complex() else gradient

    def _take_norms(self, taken: Sequence[tuple[Running, Tensor]]) -> None:
        """Make roots of the sums of squares of all ranks, laid out as r is."""
        if not taken:
            return
        roots = [total for _, total in taken]
        torch._foreach_sqrt_(roots)
        torch._foreach_div_(roots, self.divisor)
        for running, root in taken:
            same = root.stride() == running.r.stride()
            running.norm = root if same else torch.empty_like(running.r).copy_(root)

    def _take_gradient(self, running: Running, site: Agreed, summed: Tensor) -> None:
        gradient = summed / self.divisor
        if getattr(torch, site.dtype).is_complex:
            gradient = torch.view_as_complex(gradient.view(-1, 2))
        running.gradient, running.elements = gradient.view(site.shape), 1


DIGIT = 1 << 12
"""Counts travel as two digits to this base: float32 adds them exactly on up to 4,096 ranks, up to
2^36 in all; beyond that it rounds them to seven digits, as it does the statistic itself."""


def _as_digits(counts: Iterable[int]) -> list[int]:
    return [digit for count in counts for digit in divmod(count, DIGIT)]


def _from_digits(digits: list[float]) -> list[int]:
    pairs = zip(digits[::2], digits[1::2], strict=True)
    return [round(high) * DIGIT + round(low) for high, low in pairs]


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
