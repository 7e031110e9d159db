"""The running means of all sites as one transaction: prepared by passes, committed by a step.

What passes bring to a site is kept beside its r (:mod:`.running`). A commit makes it the new r of
all sites at once, a rollback forgets it; on several processes it is made that of all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from virtualgrad.operators.base import (
    Commit,
    SiteState,
    StatefulOperator,
    TakeBack,
    require_names,
    require_shape,
)
from virtualgrad.operators.compiled import Compiled
from virtualgrad.operators.guard import Guard
from virtualgrad.operators.guarded_commit import prepare_commit
from virtualgrad.operators.ranks import Gathering
from virtualgrad.operators.running import (
    Running,
    commit_all,
    forget_compiled,
    renew_factors,
    rollback_all,
)
from virtualgrad.operators.running_sites import RunningSites

_OF_COMMITS = frozenset(("begin_reduction", "reduce", "commit", "witnesses", "counts"))
"""Methods of an operator that a step asks, where it is made call by call."""


class RunningMeans(StatefulOperator):
    """An operator whose state is a running mean r at each site.

    Args:
        rho: decay of r.
        stale: whether T goes by the r of before this step.
        unit_is_sample: whether g is taken for the gradient of one sample's loss.

    Attributes:
        sites: what is kept for each of them.
        epoch: commits and rollbacks so far.
        rho_at: rho by the key of a site: all that a commit knows of one that was compiled.
    """

    def __init__(self, rho: float, *, stale: bool, unit_is_sample: bool) -> None:
        self.sites = RunningSites()
        self.epoch = 0
        self.rho_at: Callable[[str], float] = lambda key: rho
        self.stale = stale
        self.unit_is_sample = unit_is_sample
        self._gathering: Gathering | None = None  # on its way from all ranks

    def require_loadable(self, state: dict[str, SiteState]) -> None:
        """Raise if there is no r, or one of another shape than compiled passes write into."""
        for key, tensors in state.items():
            require_names(key, tensors, complete="r" in tensors, of="RMS")
            known = self.sites.kept.get(key)
            if known is not None and known.compiled is not None:
                require_shape(
                    key,
                    known.r.shape,
                    tensors["r"].shape,
                    "load it before the first compiled pass, or with inputs of the saved size",
                )

    @property
    def state(self) -> dict[str, SiteState]:
        """Site -> its r as of the last commit."""
        return {key: {"r": site.r} for key, site in self.sites.kept.items() if site.committed}

    @state.setter
    def state(self, state: dict[str, SiteState]) -> None:
        self.require_loadable(state)
        sites = self.sites.kept
        for key in [key for key in sites if key not in state]:  # as if never seen
            if sites[key].compiled is None:
                del sites[key]
            else:  # a compiled pass writes there
                sites[key].r.zero_()
                sites[key].committed = False
        for key, tensors in state.items():
            known, r = sites.get(key), tensors["r"]
            lies_there = known is not None and known.r.device == r.device
            if known is not None and known.r.shape == r.shape and (lies_there or known.compiled):
                known.r.copy_(r)  # in place: compiled and captured steps refer to this memory
                known.committed = True
            else:
                sites[key] = Running(r, committed=True)
        rollback_all(list(sites.values()), is_new=True)
        renew_factors(list(sites.values()))

    def begin_reduction(self) -> None:
        """Begin to make what was gathered that of all ranks, unless the backward pass has."""
        if self.ranks is None or not self.stale:
            return
        for key, site in self._compiled_sites():
            site.unit_is_sample, site.rho = self.unit_is_sample, self.rho_at(key)
            site.take_from_compiled()
        self._gathering = self.ranks.begin(self.sites.kept)

    def reduce(self) -> None:
        """Wait for what :meth:`begin_reduction` has begun, if it has."""
        gathering, self._gathering = self._gathering, None
        if gathering is None:
            return
        sites = self.sites.kept
        compiled = self._compiled_sites()
        self.ranks.finish(sites, gathering)
        for site in sites.values():  # also where only others came by
            site.unit_is_sample = self.unit_is_sample
        for _, site in compiled:
            site.give_to_compiled()

    def begin_graph(self, *, first: bool = False) -> None:
        """The compiled passes that begin from now on belong to another graph."""
        self.sites.begin_graph(first=first)

    def sites_counted_twice(self) -> list[str]:
        """Sites that two compiled passes through one graph have reached; the host waits."""
        return self.sites.counted_twice()

    def _compiled_sites(self) -> list[tuple[str, Running]]:
        return [(key, site) for key, site in self.sites.kept.items() if site.compiled is not None]

    def commit(self) -> None:
        """Update r at every site that a backward pass has reached."""
        self.epoch += 1
        commit_all(list(self.sites.kept.values()))

    def plain_sites(self) -> dict[str, Running] | None:
        """All sites; None on several processes, which go on together, and for users' commits."""
        return self.sites.kept if self.ranks is None and self._commits_plainly() else None

    def _commits_plainly(self) -> bool:
        """Whether no class, and nobody else, has put a method of its own in the place of ours."""
        own, ours = type(self), RunningMeans
        return _OF_COMMITS.isdisjoint(vars(self)) and all(
            [getattr(own, name) is getattr(ours, name) for name in _OF_COMMITS]
        )

    def note_commit(self, compiled: Sequence[Compiled] = ()) -> None:
        """Count a commit that others have made, and let compiled passes count anew."""
        self.epoch += 1
        forget_compiled(compiled)

    def guarded_commit(self, guard: Guard) -> Commit | None:
        """The same, unless the GPU finds a NaN or an infinity; None as for :meth:`plain_sites`."""
        if self.plain_sites() is None:
            return None
        commit = prepare_commit(guard, list(self.sites.kept.values()))

        def commit_guarded() -> TakeBack:
            self.epoch += 1
            return commit()

        return commit_guarded

    def rollback(self) -> None:
        """Forget what the backward calls since the last commit have brought."""
        self.epoch += 1
        rollback_all(list(self.sites.kept.values()))

    def scale_was(self, loss_scale: float) -> bool:
        """Be told of the loss's factor after the backward pass; whether that is not too late.

        It is where T did not need the new r, and no compiled pass has written it already.
        """
        sites = [site for site in self.sites.kept.values() if site.reached]
        if not self.stale or any(site.compiled is not None for site in sites):
            return False
        for site in sites:
            site.loss_scale = loss_scale
        return True

    def has_prepared(self) -> bool:
        """Whether a backward pass may have reached a site since the last commit."""
        return any(site.reached for site in self.sites.kept.values())

    def counts(self) -> list[tuple[str, Tensor]]:
        """Of every site that compiled passes reach, what is not finite if they counted twice."""
        pairs = [(key, site.compiled) for key, site in self.sites.kept.items()]
        return [(key, kept.counts) for key, kept in pairs if kept is not None]

    def witnesses(self) -> list[tuple[str, Tensor]]:
        """Of every site that was reached, what is finite if its g was."""
        found = [(key, site.witness()) for key, site in self.sites.kept.items()]
        return [(key, witness) for key, witness in found if witness is not None]
