"""Saved states of unfinished runs, so that a killed run goes on to the same end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from virtualgrad.errors import CheckpointError
from virtualgrad.files import read_sealed, sweep, write_sealed
from virtualgrad.lab.run import Run


def snapshot_path(run: Run, folder: Path) -> Path:
    """Where the state of a run is kept while it is not finished."""
    return (folder / run.record.file_name).with_suffix(".pt")


def save_snapshot(run: Run, folder: Path) -> None:
    """Keep the state of a run; the file is always either the old or the new one."""
    write_sealed(snapshot_path(run, folder), {"identity": _identity(run), **run.state_dict()})


def resumed(make: Callable[[], Run], folder: Path) -> tuple[Run, str]:
    """Make a run and bring it to where it was; also says in a few words what was found.

    Args:
        make: Makes the run at its first step; called again if a snapshot turns out not to fit.
        folder: Holds the snapshots.
    """
    run = make()
    path = snapshot_path(run, folder)
    if not path.exists():
        return run, "starts anew"
    try:
        state = read_sealed(path, run.setup.device)
    except CheckpointError:
        return run, f"starts anew: {path.name} is damaged"
    try:
        if state.pop("identity") != _identity(run):
            return run, f"starts anew: {path.name} has other settings or data"
        run.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as error:  # half of it may be loaded by now
        return make(), f"starts anew: {path.name} does not fit ({type(error).__name__})"
    return run, f"goes on at step {run.step:,}"


def drop_snapshot(run: Run, folder: Path) -> None:
    """Forget the state of a run, and what killed processes left half-written."""
    path = snapshot_path(run, folder)
    path.unlink(missing_ok=True)
    sweep(path)
    sweep(folder / run.record.file_name)


def _identity(run: Run) -> dict[str, object]:
    """What must be the same for a run to go on from a state."""
    return {"settings": run.record.settings, "data": run.record.data}
