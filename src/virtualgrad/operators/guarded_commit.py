"""A commit of running means that a GPU makes only if nothing that it has met is not finite.

To the host the step is made: what backward passes have brought is forgotten. Where the flag is up,
r is as it was, and T's factors, made anew from it, are, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtualgrad.operators.guard import Guard
from virtualgrad.operators.running import Running, forget_compiled, renew_factors


def commit_unless(guard: Guard, sites: Sequence[Running]) -> None:
    """Make the new running means of all sites that were reached, unless the guard's flag is up."""
    _take_candidates(guard, sites)
    by_rho: dict[float, list[Running]] = {}
    for site in sites:
        if site.elements:
            by_rho.setdefault(site.rho, []).append(site)
    for rho, group in by_rho.items():
        sampled = [site for site in group if site.norm is not None]
        others = [site for site in group if site.norm is None]
        if sampled and not _update(guard, sampled, rho):
            others = group
        for site in others:
            site.r.copy_(guard.choose(site.updated(), site.r))
    renew_factors([site for site in sites if site.elements])
    for site in sites:
        if site.reached:
            site.committed = True
        site.begin_anew()


def _update(guard: Guard, sites: Sequence[Running], rho: float) -> bool:
    means, weights = [site.r for site in sites], [site.weight for site in sites]
    return guard.update_means(means, [site.norm for site in sites], weights, rho)  # type: ignore[misc]


def _take_candidates(guard: Guard, sites: Sequence[Running]) -> None:
    """What compiled passes have made of r, and what they count."""
    compiled = [site.compiled for site in sites if site.compiled is not None]
    if not compiled:
        return
    means, candidates = [kept.r for kept in compiled], [kept.candidate for kept in compiled]
    if not guard.exchange(means, candidates):
        for kept in compiled:
            kept.r.copy_(guard.choose(kept.candidate, kept.r))
            kept.candidate.copy_(kept.r)
    forget_compiled(compiled)
