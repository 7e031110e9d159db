"""A commit of running means that a GPU makes only if nothing that it has met is not finite.

To the host the step is made: what backward passes have brought is forgotten. Where the flag is up,
r is as it was, and T's factors, made anew from it, are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from virtualgrad.operators.base import Commit, TakeBack
from virtualgrad.operators.compiled import Compiled
from virtualgrad.operators.guard import Guard
from virtualgrad.operators.running import Running, forget_compiled, renew_factors

Write = Callable[[], None]
FactorOf = tuple[float, float] | None


def prepare_commit(guard: Guard, sites: Sequence[Running]) -> Commit:
    """What makes the new running means of all sites that were reached, unless the flag is up.

    It returns what takes back that a site has an r, where it was the first for it, and not made.
    """
    compiled = [site.compiled for site in sites if site.compiled is not None]
    alike: dict[tuple[float, FactorOf], list[Running]] = {}
    for site in sites:
        if site.elements:
            alike.setdefault((site.rho, site.factor_of), []).append(site)
    writing = [_update(guard, group, *numbers) for numbers, group in alike.items()]
    if compiled:
        writing.append(_take_candidates(guard, compiled))

    def commit() -> TakeBack:
        for write in writing:
            write()
        new = [site for site in sites if site.reached and not site.committed]
        for site in sites:
            site.committed = site.committed or site.reached
            site.begin_anew()

        def take_back() -> None:
            for site in new:
                site.committed = False

        return take_back

    return commit


def _update(guard: Guard, sites: Sequence[Running], rho: float, factor_of: FactorOf) -> Write:
    """The new r of eager passes; one by one where they do not lie as kernels want them."""
    norms: list[Tensor] = []
    alone: list[Running] = []
    together: list[Running] = []
    for site in sites:
        if site.norm is None:
            alone.append(site)
        else:
            together.append(site)
            norms.append(site.norm)
    table = None
    if together:
        means, weights = [site.r for site in together], [site.weight for site in together]
        factors = [site.factor for site in together if site.factor is not None and factor_of]
        table = guard.will_update(means, norms, weights, factors)

    def write() -> None:
        if table is not None and guard.takes(table):
            guard.update_means(table, rho, factor_of)
            others = alone
        else:
            others = list(sites)
        for site in others:
            site.r.copy_(guard.choose(site.updated(), site.r))
        renew_factors(others)

    return write


def _take_candidates(guard: Guard, compiled: Sequence[Compiled]) -> Write:
    """What compiled passes have made of r, and what they count."""
    table = guard.will_exchange([kept.r for kept in compiled], [k.candidate for k in compiled])

    def write() -> None:
        if guard.takes(table):
            guard.exchange(table)
        else:
            for kept in compiled:
                kept.r.copy_(guard.choose(kept.candidate, kept.r))
                kept.candidate.copy_(kept.r)
        forget_compiled(compiled)

    return write
