"""Studies, which are Optuna's word for the trials of one search: made, found, read and mended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from virtualgrad.lab.sweep.search import DIVERGED, End, Search, SweepError, Trial

if TYPE_CHECKING:
    from virtualgrad.lab.sweep.storage import Store

FORMAT = 1
IDENTITY = "virtualgrad"
"""Attribute of a study with what its trials have in common."""

ERRORS = "errors"
"""Attribute of a trial: the last error of every seed."""

TAKEN_OVER = "takes over"
"""Attribute of a trial: the number of the one whose worker was lost."""

LOSSES = "losses"
"""Attribute of a trial: how many workers its settings have cost."""

MOST_LOSSES = 3


def queue_again(study: optuna.Study, lost: FrozenTrial) -> None:
    """Let another worker try the settings of a trial that did not come to its end.

    Settings that cost several workers may be what ends them; then others take the place.
    """
    losses = lost.user_attrs.get(LOSSES, 0) + 1
    if losses < MOST_LOSSES:
        put_back(study, lost, losses)


def put_back(study: optuna.Study, lost: FrozenTrial, losses: int = 0) -> None:
    """Queue the settings of a trial, whatever became of it."""
    study.enqueue_trial(lost.params, user_attrs={TAKEN_OVER: lost.number, LOSSES: losses})


def open_study(search: Search, store: Store, storage: RDBStorage) -> optuna.Study:
    """The study of a search: made, or found with the same identity.

    Raises:
        SweepError: The study there is of another version or searches something else.
    """
    from virtualgrad import __version__  # noqa: PLC0415 - the package imports the lab nowhere

    ranges = {name: [of.low, of.high] for name, of in search.ranges.items()}
    expected = {"format": FORMAT, "version": __version__, "ranges": ranges, **search.identity}
    with store.reachable(), store.lock(search.name):
        study = optuna.create_study(storage=storage, study_name=search.name, load_if_exists=True)
        found = study.user_attrs.get(IDENTITY)
        if found is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(IDENTITY, expected)
            return study
    if found != expected:
        raise SweepError.of(
            given=f"the study {search.name!r} in {store.shown}, {_difference(found, expected)}",
            allowed="trials of the same version, recipe, settings and ranges in one study",
            todo="search under another --name or in another --out; the study there stays as it is",
        )
    return study


def _difference(found: object, expected: dict[str, object]) -> str:
    if not isinstance(found, dict):
        return "which virtualgrad did not make"
    keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    told = (f"{key} {found.get(key)} there, {expected.get(key)} here" for key in keys)
    return f"which differs: {'; '.join(told)}"


def finished_trials(study: optuna.Study) -> list[Trial]:
    """The finished trials of a study, in the order of their numbers."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return [_trial(trial) for trial in study.get_trials(deepcopy=False, states=states)]


def _trial(trial: FrozenTrial) -> Trial:
    errors = tuple(trial.user_attrs.get(ERRORS, ()))
    if trial.state is TrialState.PRUNED:
        at = max(trial.intermediate_values)
        end, errors = End.PRUNED, (trial.intermediate_values[at],)
    else:
        end = End.COMPLETE if errors else End.DIVERGED
    return Trial(trial.number, dict(trial.params), end, errors or (DIVERGED,))
