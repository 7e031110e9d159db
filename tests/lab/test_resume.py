"""Killed or interrupted anywhere, a run goes on to the same end."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_lab
import torch
from tiny_lab import TINY, a_job

from virtualgrad.lab import reproduce
from virtualgrad.lab.interrupt import StopRequest
from virtualgrad.lab.record import Record
from virtualgrad.lab.reproduce import make_runs


def text(console):
    return console.file.getvalue()


def curves(out):
    return {path.name: Record.load(path).curve for path in sorted(out.glob("*.json"))}


SCRIPT = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from rich.console import Console
from tiny_lab import TINY, tiny_data
from virtualgrad.lab import engine, reproduce
from virtualgrad.lab.run import Run, Setup

out, slowly, resume = Path(sys.argv[1]), sys.argv[2] == "slowly", sys.argv[3] == "resume"
reproduce.DATA["tiny"] = tiny_data
reproduce.SECONDS_BETWEEN_SNAPSHOTS = 0
reproduce.drop_snapshot = lambda run, folder: None
engine.SECONDS_UNWATCHED = 0
train_step = Run.train_step
if slowly:
    Run.train_step = lambda run: (train_step(run), time.sleep(0.01))
job = reproduce.Job(TINY, ["{optimizer}"], [0], Setup(torch.device("cpu")), out, resume=resume)
make = reproduce.Run
reproduce.Run = lambda *a: runs.append(make(*a)) or runs[-1]
runs = []
reproduce.make_runs(job, Console())
torch.save(runs[-1].state_dict(), out / "end.pt")
"""


@pytest.mark.parametrize("optimizer", ["svgd", "adam"])
def test_killed_anywhere_and_resumed_ends_bit_by_bit_the_same(tmp_path, optimizer):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{optimizer}", optimizer))
    source = Path(reproduce.__file__).parents[2]
    environment = {"PYTHONPATH": f"{source}:{Path(tiny_lab.__file__).parent}"}

    def start(out, *how):
        command = [sys.executable, str(script), str(tmp_path / out), *how]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    whole = start("whole", "fast", "new")
    killed = start("killed", "slowly", "new")
    snapshot = tmp_path / "killed" / f"tiny-{optimizer}-seed0.pt"
    while not snapshot.exists():
        assert killed.poll() is None
        time.sleep(0.01)
    time.sleep(0.15)
    killed.send_signal(signal.SIGKILL)
    assert killed.communicate() and killed.returncode == -signal.SIGKILL
    record = Record.load(snapshot.with_suffix(".json"))
    assert not record.finished

    resumed = start("killed", "fast", "resume")
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and "goes on at step" in said
    assert whole.communicate(timeout=300) and whole.returncode == 0
    assert curves(tmp_path / "killed") == curves(tmp_path / "whole")
    ends = [tmp_path / name / "end.pt" for name in ("whole", "killed")]
    one, other = (torch.load(end, weights_only=True) for end in ends)
    torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
    states = one["optimizer"]["state"], other["optimizer"]["state"]
    assert states[0]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_resume_leaves_out_what_is_finished(tmp_path, console):
    first = make_runs(a_job(tmp_path, seeds=(0, 1)), console)
    again = make_runs(a_job(tmp_path, seeds=(0, 1, 2), at_once=3, resume=True), console)
    assert again[:2] == first and len(again) == 3
    assert "seed 1: finished before" in text(console) and "seed 2: starts anew" in text(console)


def test_a_record_of_other_settings_or_data_does_not_count_as_finished(tmp_path, console):
    make_runs(a_job(tmp_path), console)
    longer = replace(TINY, steps=50)
    (record,) = make_runs(a_job(tmp_path, recipe=longer, resume=True), console)
    assert record.curve.step[-1] == 50


def test_a_damaged_snapshot_is_not_used_and_it_is_said(tmp_path, console):
    make_runs(a_job(tmp_path / "whole"), console)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "tiny-svgd-seed0.pt").write_bytes(b"damaged")
    make_runs(a_job(tmp_path / "new", resume=True), console)
    assert "seed 0: starts anew: tiny-svgd-seed0.pt is damaged" in text(console)
    assert curves(tmp_path / "new") == curves(tmp_path / "whole")
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


def press_ctrl_c(monkeypatch, at, times=1):
    """After so many steps."""
    train_step = reproduce.Run.train_step

    def step(run):
        train_step(run)
        if run.record.seed == 0 and run.batches.position == at * run.batches.batch_size:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("virtualgrad.lab.engine.SECONDS_UNWATCHED", 0)
    monkeypatch.setattr(reproduce.Run, "train_step", step)


def test_ctrl_c_keeps_all_steps(tmp_path, console, monkeypatch):
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, at=4)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            make_runs(a_job(tmp_path / "stopped", seeds=(0, 1), at_once=2), console)
        assert signal.getsignal(signal.SIGINT) is before
    assert not Record.load(tmp_path / "stopped" / "tiny-svgd-seed0.json").finished
    # one of two lost its state: they go on from different steps, and end the same
    (tmp_path / "stopped" / "tiny-svgd-seed1.pt").unlink()
    make_runs(a_job(tmp_path / "stopped", seeds=(0, 1), at_once=2, resume=True), console)
    assert "seed 0: goes on at step 4" in text(console)
    make_runs(a_job(tmp_path / "whole", seeds=(0, 1)), console)
    assert curves(tmp_path / "stopped") == curves(tmp_path / "whole")


def test_a_second_ctrl_c_does_not_wait(tmp_path, console, monkeypatch):
    press_ctrl_c(monkeypatch, at=4, times=2)
    with pytest.raises(KeyboardInterrupt):
        make_runs(a_job(tmp_path), console)
    assert not tmp_path.exists() or not list(tmp_path.glob("*.pt"))


def test_runs_can_be_made_in_another_thread(tmp_path, console):
    thread = threading.Thread(target=make_runs, args=(a_job(tmp_path), console))
    thread.start()
    thread.join()
    assert Record.load(tmp_path / "tiny-svgd-seed0.json").finished
    assert not StopRequest().made


def test_starting_anew_forgets_an_older_state(tmp_path, console, monkeypatch):
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, at=4)
        with pytest.raises(KeyboardInterrupt):
            make_runs(a_job(tmp_path), console)
        press_ctrl_c(patch, at=2)
        with pytest.raises(KeyboardInterrupt):
            make_runs(a_job(tmp_path), console)
    make_runs(a_job(tmp_path, resume=True), console)
    assert "goes on at step 2" in text(console) and "at step 4" not in text(console)
