"""Workers in processes of their own: killed, interrupted, orphaned, failing."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import sweep_fakes
from optuna.trial import TrialState
from sweep_fakes import a_search, all_trials, let_go, notes, rates, sqlite, wait_for

from virtualgrad.lab import sweep as package
from virtualgrad.lab.sweep.pool import run_searches
from virtualgrad.lab.sweep.search import SweepError
from virtualgrad.lab.sweep.storage import Store
from virtualgrad.lab.sweep.studies import TAKEN_OVER


@pytest.mark.slow
def test_four_workers_and_one_is_killed(tmp_path, console, postgresql):
    """With a real server: no trial lost, none counted twice, the victim's is taken over."""
    store = Store(postgresql, heartbeat=1, grace=15)  # a busy machine may stall for seconds
    folder = tmp_path / "notes"
    search = a_search(folder, trials=14, free=4)
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(run_searches([search], store, 4, console))
    )
    thread.start()

    def all_at_it():
        """What each of the four workers is held in, once all are."""
        ended = notes(folder, "end")
        held = [note for note in notes(folder, "begin") if note not in ended]
        return held if len(ended) >= 4 and len({worker for worker, _ in held}) == 4 else None

    process, rate = wait_for(all_at_it)[0]
    assert process in {child.pid for child in multiprocessing.active_children()}
    os.kill(process, signal.SIGKILL)
    let_go(folder)
    thread.join(300)
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
    assert "ended with the exit code -9; its trial will be taken over" in console.file.getvalue()


SCRIPT = """
import sys
from pathlib import Path
from rich.console import Console
from sweep_fakes import a_search
from virtualgrad.lab.sweep.pool import run_searches
from virtualgrad.lab.sweep.storage import Store

if __name__ == "__main__":
    out = Path(sys.argv[1])
    search = a_search(out / "notes", trials=14, free=3)
    run_searches([search], Store(f"sqlite:///{out / 'sweep.db'}"), 2, Console())
"""


def start_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = Path(package.__file__).parents[3]
    path = {"PYTHONPATH": f"{source}:{Path(sweep_fakes.__file__).parent}"}
    return subprocess.Popen(
        [sys.executable, script, tmp_path],
        env={**os.environ, **path},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_ctrl_c_with_worker_processes(tmp_path, console):
    """A terminal sends it to all of them; every trial under way is put back."""
    folder, store = tmp_path / "notes", sqlite(tmp_path)

    def press():
        wait_for(lambda: len(notes(folder, "end")) >= 3)
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_searches([a_search(folder, trials=14, free=3)], store, 2, console)
    thread.join()
    search = a_search(folder, trials=14)
    before = all_trials(search, store)
    assert TrialState.RUNNING not in {trial.state for trial in before}
    complete = [trial for trial in before if trial.state is TrialState.COMPLETE]
    assert 3 <= len(complete) < 14
    (found,) = run_searches([search], store, 1, console)
    assert len(found) == len(set(rates(found))) == len(set(notes(folder, "end"))) == 14
    put_back = [t.params["lr"] for t in before if t.state is TrialState.FAIL]
    assert put_back and set(put_back) <= set(rates(found))


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path):
    process = start_script(tmp_path)
    folder = tmp_path / "notes"
    wait_for(lambda: len({worker for worker, _ in notes(folder, "begin")}) == 2)
    workers = {worker for worker, _ in notes(folder, "begin")}
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{worker}/stat").exists() for worker in workers))
    assert len(notes(folder, "end")) < 14
    states = [trial.state for trial in all_trials(a_search(folder), sqlite(tmp_path))]
    assert TrialState.RUNNING not in states  # they put back what they were at


@pytest.mark.slow
def test_what_stops_one_worker_is_told(tmp_path, console):
    search = a_search(tmp_path / "notes", hook=_fail)
    with pytest.raises(SweepError, match="disk full"):
        run_searches([search], sqlite(tmp_path), 2, console)
    (found,) = run_searches([a_search(tmp_path / "notes")], sqlite(tmp_path), 1, console)
    assert len(found) == 6


def _fail(settings):
    raise OSError("disk full")
