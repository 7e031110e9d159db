"""Saved states of unfinished runs, so that a killed run goes on to the same end.

A file is the SHA-256 of a state and then the state as torch.save writes it: torch.load alone does
not notice a changed byte.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import torch

from virtualgrad.lab.record import sweep, write_safely
from virtualgrad.lab.run import Run

DIGEST = hashlib.sha256().digest_size


def snapshot_path(run: Run, folder: Path) -> Path:
    """Where the state of a run is kept while it is not finished."""
    return (folder / run.record.file_name).with_suffix(".pt")


def save_snapshot(run: Run, folder: Path) -> None:
    """Keep the state of a run; the file is always either the old or the new one."""
    buffer = io.BytesIO()
    torch.save({"identity": _identity(run), **run.state_dict()}, buffer)
    content = buffer.getvalue()
    write_safely(snapshot_path(run, folder), hashlib.sha256(content).digest() + content)


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
    saved = path.read_bytes()
    found, content = saved[:DIGEST], saved[DIGEST:]
    if found != hashlib.sha256(content).digest():
        return run, f"starts anew: {path.name} is damaged"
    try:
        state = torch.load(io.BytesIO(content), map_location=run.setup.device, weights_only=True)
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
