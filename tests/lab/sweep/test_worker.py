"""Exactly as many trials as asked for, whatever happens to those who make them."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import fmean

import optuna
import pytest
import sweep_fakes
from optuna.trial import TrialState
from sweep_fakes import LR, a_search, error_at, notes

from virtualgrad.lab import sweep as package
from virtualgrad.lab.sweep.pool import run_searches
from virtualgrad.lab.sweep.search import End, SweepError
from virtualgrad.lab.sweep.storage import TAKEN_OVER, Store, open_study
from virtualgrad.lab.sweep.worker import RANDOM_TRIALS


def sqlite(folder, **how):
    return Store(f"sqlite:///{folder / 'sweep.db'}", **how)


def all_trials(search, store):
    with store.opened() as storage:
        return open_study(search, store, storage).get_trials()


def rates(trials):
    return [trial.settings["lr"] for trial in trials]


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


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_four_workers_and_one_is_killed(tmp_path, console, postgresql):
    """With a real server: no trial lost, none counted twice, the victim's is taken over."""
    store = Store(postgresql, heartbeat=1, grace=3)
    folder = tmp_path / "notes"
    search = a_search(folder, trials=14, seconds=0.4)
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(run_searches([search], store, 4, console))
    )
    thread.start()

    def victim():
        ended = set(notes(folder, "end"))
        at_it = [note for note in notes(folder, "begin") if note not in ended]
        everyone = {process for process, _ in notes(folder, "begin")}
        return len(everyone) == 4 and len(ended) >= 4 and at_it and at_it[0]

    process, rate = wait_for(victim)
    assert process in {child.pid for child in multiprocessing.active_children()}
    os.kill(process, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()

    (found,) = results
    assert len(found) == 14  # none lost, and not one too many
    assert len({trial.number for trial in found}) == len(set(rates(found))) == 14
    assert rates(found).count(rate) == 1
    ends = Counter(rate for _, rate in notes(folder, "end"))
    assert set(ends.values()) == {1} and set(ends) == set(rates(found))
    by_number = {trial.number: trial for trial in all_trials(search, store)}
    states = Counter(trial.state for trial in by_number.values())
    assert states == {TrialState.COMPLETE: 14, TrialState.FAIL: 1}
    (lost,) = (trial for trial in by_number.values() if trial.state is TrialState.FAIL)
    (heir,) = (t for t in by_number.values() if t.user_attrs.get(TAKEN_OVER) == lost.number)
    assert heir.params == lost.params == {"lr": rate} and heir.state is TrialState.COMPLETE
    assert "ended with the exit code -9; another takes its trial over" in console.file.getvalue()


SCRIPT = """
import sys
from pathlib import Path
from statistics import fmean
from rich.console import Console
from sweep_fakes import a_search
from virtualgrad.lab.sweep.pool import run_searches
from virtualgrad.lab.sweep.storage import Store

if __name__ == "__main__":
    out = Path(sys.argv[1])
    search = a_search(out / "notes", trials=14, seconds=0.4)
    run_searches([search], Store(f"sqlite:///{out / 'sweep.db'}"), 2, Console())
"""


@pytest.mark.slow
def test_ctrl_c_with_worker_processes(tmp_path, console):
    """A terminal sends it to all of them; every trial under way is put back."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = Path(package.__file__).parents[3]
    path = {"PYTHONPATH": f"{source}:{Path(sweep_fakes.__file__).parent}"}
    process = subprocess.Popen(
        [sys.executable, script, tmp_path],
        env={**os.environ, **path},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = tmp_path / "notes"
    wait_for(lambda: len(notes(folder, "end")) >= 3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in said and process.returncode != 0
    search, store = a_search(folder, trials=14), sqlite(tmp_path)
    before = all_trials(search, store)
    assert TrialState.RUNNING not in {trial.state for trial in before}
    complete = [trial for trial in before if trial.state is TrialState.COMPLETE]
    assert 3 <= len(complete) < 14
    (found,) = run_searches([search], store, 1, console)
    assert len(found) == len(set(rates(found))) == len(set(notes(folder, "end"))) == 14
    put_back = [t.params["lr"] for t in before if t.state is TrialState.FAIL]
    assert put_back and set(put_back) <= set(rates(found))


@pytest.mark.slow
def test_what_stops_one_worker_is_told(tmp_path, console):
    search = a_search(tmp_path / "notes", hook=_fail)
    with pytest.raises(SweepError, match="disk full"):
        run_searches([search], sqlite(tmp_path), 2, console)
    (found,) = run_searches([a_search(tmp_path / "notes")], sqlite(tmp_path), 1, console)
    assert len(found) == 6


def _fail(settings):
    raise OSError("disk full")
