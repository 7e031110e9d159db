"""A worker: takes trials, one at a time, until every search has as many as it wants.

How many trials finish is exact, whatever happens to workers. A trial is taken under the lock of its
study, and only while finished and running ones together are fewer than wanted. A worker that is
lost stops sending signs of life; its trial is then marked as failed, which frees the place, and its
settings are the next to be tried. A worker that comes back after that finds its trial closed, and
its result is dropped.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import optuna
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from virtualgrad.lab.sweep.pruning import hopeless
from virtualgrad.lab.sweep.search import DIVERGED, DivergedError, Objective, Search
from virtualgrad.lab.sweep.storage import Store
from virtualgrad.lab.sweep.studies import (
    ERRORS,
    TAKEN_OVER,
    open_study,
    put_back,
    queue_again,
)

RANDOM_TRIALS = 16
"""The first trials are spread at random over the ranges; then the sampler learns from them."""

SECONDS_BETWEEN_LOOKS = 1.0
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
BEGUN = "begun"
"""Attribute of a trial that has sent its first sign of life."""


def work(
    searches: Sequence[Search], store: Store, stop: Callable[[], bool], tick: Callable[[], None]
) -> None:
    """Make trials of the searches, in their order, until all are finished.

    Args:
        searches: What to search.
        store: Where the trials are kept.
        stop: Asked often; once it says yes, the trial under way is put back and work ends.
        tick: Called often.
    """
    objective: tuple[str, Objective] | None = None
    with store.opened() as storage:
        studies = [(search, open_study(search, store, storage)) for search in searches]
        while not stop():
            tick()
            found = next((pair for pair in studies if _wanted(*pair) > 0), None)
            if found is None:
                if all(finished(study) >= search.trials for search, study in studies):
                    return
                time.sleep(SECONDS_BETWEEN_LOOKS)  # others are at the last trials, and may be lost
                for search, study in studies:
                    with store.lock(search.name):
                        _close_lost(study)
                continue
            search, study = found
            if objective is None or objective[0] != search.name:
                objective = None  # the data of the last one can go before the next one's comes
                objective = (search.name, search.make())
            attempt = _Attempt(
                search, study, store, storage, objective=objective[1], stop=stop, tick=tick
            )
            attempt.make()


def finished(study: optuna.Study) -> int:
    """How many trials came to an end, pruned ones among them."""
    return len(study.get_trials(deepcopy=False, states=FINISHED))


def _wanted(search: Search, study: optuna.Study) -> int:
    counted = (*FINISHED, TrialState.RUNNING)
    return search.trials - len(study.get_trials(deepcopy=False, states=counted))


def _close_lost(study: optuna.Study) -> None:
    """Mark trials of lost workers as failed, and queue their settings. Only under the lock.

    For a trial that never gave a sign of life Optuna waits forever. Whoever holds the lock knows
    that nobody else is just beginning, so a running trial that has not begun never will.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if BEGUN not in trial.user_attrs:
            study.tell(trial.number, state=TrialState.FAIL)
            queue_again(study, trial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)


class _Attempt:
    """One trial, if there is still one to take."""

    def __init__(
        self,
        search: Search,
        study: optuna.Study,
        store: Store,
        storage: RDBStorage,
        *,
        objective: Objective,
        stop: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None:
        self.search, self.study, self.store, self.storage = search, study, store, storage
        self.objective, self.stop, self.tick = objective, stop, tick
        self.lock = ExitStack()
        self.trial: optuna.Trial | None = None
        self.ended = False

    def make(self) -> None:
        """Take a trial under the lock and make it; a result that comes too late is dropped."""
        with self.lock:
            self.lock.enter_context(self.store.lock(self.search.name))
            _close_lost(self.study)
            if _wanted(self.search, self.study) <= 0:
                return
            number = len(self.study.get_trials(deepcopy=False))
            self.study.sampler = _sampler(f"{self.search.name} {number}")
            try:
                self.study.optimize(self._begin, n_trials=1)
            except BaseException as error:
                closed = isinstance(error, ValueError | UpdateFinishedTrialError)
                if self.ended and closed:
                    return  # others took it over in the meantime
                self._put_back()
                if not (self.stop() and (closed or isinstance(error, KeyboardInterrupt))):
                    raise

    def _begin(self, trial: optuna.Trial) -> float:
        self.trial = trial
        settings = {
            name: trial.suggest_float(name, of.low, of.high, log=True)
            for name, of in self.search.ranges.items()
        }
        self.storage.record_heartbeat(trial._trial_id)
        trial.set_user_attr(BEGUN, True)
        self.lock.close()  # from here on it counts as running
        curve: dict[int, float] = {}

        def on_evaluation(step: int, error: float) -> None:
            trial.report(error, step)
            curve[step] = error
            if hopeless(curve, self._others(), self.search.warm_up):
                raise TrialPruned

        try:
            errors = self.objective(settings, on_evaluation, self._on_progress)
            trial.set_user_attr(ERRORS, list(errors))
        except DivergedError:
            errors = (DIVERGED,)
        except (TrialPruned, UpdateFinishedTrialError):
            self.ended = True
            raise
        self.ended = True
        return sum(errors) / len(errors)

    def _others(self) -> list[dict[int, float]]:
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [trial.intermediate_values for trial in trials if ERRORS in trial.user_attrs]

    def _on_progress(self) -> None:
        self.tick()
        if self.stop():
            raise KeyboardInterrupt

    def _put_back(self) -> None:
        """Leave the settings to another worker, or to the next call."""
        if self.trial is not None:
            lost = self.study.trials[self.trial.number]
            queued = {each.user_attrs.get(TAKEN_OVER) for each in self.study.trials}
            if lost.state is TrialState.FAIL and lost.number not in queued:
                put_back(self.study, lost)


def _sampler(name: str) -> TPESampler:
    """A sampler per trial, seeded by its name: workers differ, and one alone is repeatable."""
    seed = zlib.crc32(name.encode())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(
            n_startup_trials=RANDOM_TRIALS, multivariate=True, constant_liar=True, seed=seed
        )
