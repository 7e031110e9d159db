"""Exactly as many trials as asked for, whatever happens to those who make them."""

import math
import signal
from collections import Counter
from statistics import fmean

import optuna
import pytest
from optuna.trial import TrialState
from sweep_fakes import LR, a_search, all_trials, error_at, notes, rates, sqlite

from virtualgrad.lab.sweep.pool import run_searches
from virtualgrad.lab.sweep.search import End
from virtualgrad.lab.sweep.studies import LOSSES, TAKEN_OVER, open_study, queue_again
from virtualgrad.lab.sweep.worker import RANDOM_TRIALS


def test_trials_have_the_errors_of_their_settings(tmp_path, console):
    (found,) = run_searches([a_search(tmp_path / "notes")], sqlite(tmp_path), 1, console)
    assert [trial.number for trial in found] == list(range(6))
    assert len(set(rates(found))) == 6 and all(LR.low <= rate <= LR.high for rate in rates(found))
    for trial in found:
        assert trial.end is End.COMPLETE
        assert trial.spread.mean == pytest.approx(error_at(trial.settings))
        assert trial.spread.sd == pytest.approx(0.1 * math.sqrt(2))
    assert "0 of 6 trials" in console.file.getvalue() or console.file.getvalue() == ""


def test_the_search_looks_where_errors_are_low(tmp_path, console):
    search = a_search(tmp_path / "notes", trials=RANDOM_TRIALS + 8)
    (found,) = run_searches([search], sqlite(tmp_path), 1, console)
    errors = [error_at(trial.settings) for trial in found]
    assert fmean(errors[RANDOM_TRIALS:]) < fmean(errors[:RANDOM_TRIALS]) - 1
    assert min(errors) < 2.5


def test_every_search_gets_as_many_trials_and_one_alone_is_repeatable(tmp_path, console):
    def searches(folder):
        return [a_search(tmp_path / folder / name, name=name, trials=4) for name in ("a", "b")]

    first = run_searches(searches("1"), sqlite(tmp_path / "1"), 1, console)
    second = run_searches(searches("2"), sqlite(tmp_path / "2"), 1, console)
    assert [len(trials) for trials in first] == [4, 4]
    assert first == second and rates(first[0]) != rates(first[1])


def test_more_trials_later_and_nothing_to_do(tmp_path, console):
    store = sqlite(tmp_path)
    (few,) = run_searches([a_search(tmp_path / "notes", trials=3)], store, 1, console)
    (more,) = run_searches([a_search(tmp_path / "notes", trials=5)], store, 1, console)
    (same,) = run_searches([a_search(tmp_path / "notes", trials=2)], store, 1, console)
    assert more[:3] == few and len(more) == 5 and same == more
    assert len(notes(tmp_path / "notes", "begin")) == 5


def test_hopeless_and_diverging_trials_are_finished_ones(tmp_path, console):
    search = a_search(tmp_path / "notes", trials=16, diverges_above=0.1, curve=(4, 3, 2, 1))
    (found,) = run_searches([search], sqlite(tmp_path), 1, console)
    ends = Counter(trial.end for trial in found)
    assert len(found) == 16 and ends[End.DIVERGED] and ends[End.PRUNED] and ends[End.COMPLETE] >= 5
    for trial in found:
        assert (trial.end is End.DIVERGED) == (trial.settings["lr"] > 0.1)
        if trial.end is End.DIVERGED:
            assert trial.errors == (100.0,)
        if trial.end is End.PRUNED:  # in the middle of the run
            factors = [trial.spread.mean / error_at(trial.settings)]
            assert round(factors[0], 6) in {4, 3, 2, 1}


def test_ctrl_c_and_go_on(tmp_path, console):
    folder, store = tmp_path / "notes", sqlite(tmp_path)
    pressed = []

    def press(settings):
        if len(notes(folder, "end")) == 2 and not pressed:
            pressed.append(settings["lr"])
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_searches([a_search(folder, hook=press)], store, 1, console)
    assert signal.getsignal(signal.SIGINT) is before
    (found,) = run_searches([a_search(folder)], store, 1, console)
    assert len(found) == 6 and len(set(rates(found))) == 6
    assert rates(found)[2] == pressed[0]  # what was interrupted comes first
    assert len(notes(folder, "end")) == 6
    uninterrupted = run_searches([a_search(tmp_path / "n")], sqlite(tmp_path / "w"), 1, console)[0]
    assert rates(found)[:3] == rates(uninterrupted)[:3]


def test_an_error_keeps_the_trial_for_later(tmp_path, console):
    def fail(settings):
        raise OSError("disk full")

    store = sqlite(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        run_searches([a_search(tmp_path / "notes", hook=fail)], store, 1, console)
    (found,) = run_searches([a_search(tmp_path / "notes")], store, 1, console)
    tried = notes(tmp_path / "notes", "begin")
    assert len(found) == 6 and tried[0][1] in [pytest.approx(rate) for rate in rates(found)]


def test_a_result_that_comes_after_the_takeover_is_dropped(tmp_path, console):
    """As of a worker that slept for longer than the grace: others have closed its trial."""
    store, closed = sqlite(tmp_path), []

    def take_over(settings):
        if closed:
            return
        closed.append(settings["lr"])
        study = optuna.load_study(study_name="fake", storage=store.url)
        study.tell(0, state=TrialState.FAIL)
        study.enqueue_trial(settings, user_attrs={TAKEN_OVER: 0})

    for curve in ((), (1.0,)):  # found out at the end, or on the way
        closed.clear()
        store = sqlite(tmp_path / str(len(curve)))
        search = a_search(tmp_path / "n", hook=take_over, curve=curve)
        (found,) = run_searches([search], store, 1, console)
        assert len(found) == 6 and rates(found).count(closed[0]) == 1
        states = [trial.state for trial in all_trials(search, store)]
        assert states.count(TrialState.FAIL) == 1 and len(states) == 7


def test_a_trial_whose_worker_never_began_is_taken_over(tmp_path, console):
    store, search = sqlite(tmp_path), a_search(tmp_path / "notes", trials=1)
    with store.opened() as storage:
        open_study(search, store, storage)
    optuna.load_study(study_name="fake", storage=store.url).ask()  # and then nothing more
    (found,) = run_searches([search], store, 1, console)
    assert len(found) == 1
    states = [trial.state for trial in all_trials(search, store)]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def test_settings_that_cost_three_workers_are_let_go(tmp_path, console):
    store, search = sqlite(tmp_path), a_search(tmp_path / "notes", trials=2)
    with store.opened() as storage:
        open_study(search, store, storage).enqueue_trial({"lr": 0.5})
    for _ in range(2):
        lost = optuna.load_study(study_name="fake", storage=store.url).ask()
        lost.suggest_float("lr", LR.low, LR.high, log=True)
        with store.opened() as storage:
            study = open_study(search, store, storage)
            study.tell(lost.number, state=TrialState.FAIL)
            queue_again(study, study.trials[lost.number])
    queued = [t for t in all_trials(search, store) if t.state is TrialState.WAITING]
    assert [t.user_attrs[LOSSES] for t in queued] == [2]
    optuna.load_study(study_name="fake", storage=store.url).ask()
    (found,) = run_searches([search], store, 1, console)
    assert len(found) == 2 and 0.5 not in rates(found)
