"""Checkpoints of a training loop: killed at any moment, it goes on from the last whole one.

    checkpoints = Checkpoints("checkpoints")
    latest = checkpoints.load()
    if latest is not None:
        model.load_state_dict(latest.state["model"])
        optimizer.load_state_dict(latest.state["optimizer"])
    ...
    checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

What else the loop depends on belongs into the state, too: schedulers, ``torch.get_rng_state()``,
the place in the data.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed

from virtualgrad.errors import CheckpointError, DamagedCheckpointWarning, HyperparameterError
from virtualgrad.files import read_sealed, sweep, write_sealed

NAME = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """A state that was saved, and when.

    Attributes:
        step: the step that it was saved with.
        state: the state itself.
        path: the file that it was read from.
    """

    step: int
    state: Any
    path: Path


class Checkpoints:
    """The last few checkpoints of a run, in a folder of their own.

    A file is written as a whole or not at all, and carries the SHA-256 of its content: a truncated
    or altered one is named and passed over, and the one before it is used.

    On several processes (after ``init_process_group``), call both methods on all of them: rank 0
    writes, and all ranks load the same checkpoint, the newest that is whole on each of them. The
    folder must be one that all of them see.

    Args:
        folder: where the files are kept, ``step-1000.pt`` and so on; made when first needed. Each
            is also a file that ``torch.load`` reads.
        keep: how many are kept; with 1 there is none to go back to.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise HyperparameterError.of(
                given=f"keep={keep}", allowed="1 or more", todo="leave it out to keep two"
            )
        self.folder = Path(folder)
        self.keep = keep
        self._damaged: set[Path] = set()

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, and remove those that are not to be kept any longer.

        Args:
            step: how far the run is; a later checkpoint has a larger one.
            state: state_dicts and plain data, whole ones: those of a sharded model (FSDP) are for
                ``torch.distributed.checkpoint``.
        """
        _require_whole(state)
        if _rank() != 0:
            return
        self._require_latest(step)
        path = self.folder / f"step-{step}.pt"
        write_sealed(path, {"step": step, "state": state})
        self._damaged.discard(path)
        found = self._newest_first()
        for old in [*self._damaged, *[p for p in found if p not in self._damaged][self.keep :]]:
            old.unlink(missing_ok=True)
        self._damaged.clear()
        sweep(self.folder / "step-*.pt")

    def load(self, map_location: Any = "cpu") -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None if none was ever written.

        Args:
            map_location: as for ``torch.load``. The default leaves it to ``load_state_dict`` to
                bring each tensor to its place; states of random number generators stay on the CPU.

        Raises:
            CheckpointError: there are checkpoints, but not one of them is whole.

        Warns:
            DamagedCheckpointWarning: for each that is passed over, by name.
        """
        paths = [self.folder / name for name in _as_on_rank_0(self._newest_first())]
        for path in paths:
            content, problem = None, None
            try:
                content = read_sealed(path, map_location)
            except CheckpointError:
                problem = "truncated or altered"
            except OSError as error:
                problem = error.strerror or type(error).__name__
            found = _first_problem(problem)
            if found is None:
                assert content is not None
                return Checkpoint(content["step"], content["state"], path)
            self._damaged.add(path)
            warning = DamagedCheckpointWarning.of(
                given=f"{path.name}: {found}",
                allowed="a checkpoint that is byte for byte as it was written",
                todo="nothing, if the one before it will do, which is tried now; else bring back "
                "a whole copy and start again",
            )
            warnings.warn(warning, stacklevel=2)
        if paths:
            raise CheckpointError.of(
                given=f"{len(paths)} checkpoints in {self.folder.name!r}, none of them whole: "
                f"{', '.join(path.name for path in paths)}",
                allowed="at least one that is as it was written, on every process",
                todo="bring back a whole one, or remove these files to start anew",
            )
        return None

    def _newest_first(self) -> list[Path]:
        """All checkpoints, by their steps."""
        found = self.folder.glob("step-*.pt")
        return sorted(filter(_is_checkpoint, found), key=_step_of, reverse=True)

    def _require_latest(self, step: int) -> None:
        """Refuse a step that is earlier than a checkpoint that may be whole.

        That one would be loaded instead of this one, though it is of another run.
        """
        later = [path for path in self._newest_first() if _step_of(path) > step]
        later = [path for path in later if path not in self._damaged]
        if step < 0 or later:
            where = f", where {self.folder.name!r} holds {later[0].name}" if later else ""
            raise CheckpointError.of(
                given=f"step {step}{where}",
                allowed="steps from 0 on, each after those that are there",
                todo="load() first and go on from there, or use a folder of its own for a new run",
            )


def _is_checkpoint(path: Path) -> bool:
    return NAME.fullmatch(path.name) is not None


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _require_whole(state: object) -> None:
    """Refuse shards: rank 0 would write its own alone."""
    for place, value in _leaves(state, ""):
        if hasattr(value, "full_tensor"):
            raise CheckpointError.of(
                given=f"a shard of a tensor, at {place}",
                allowed="whole tensors, as one process has them",
                todo="pass full_state_dict=True to torch.distributed.checkpoint.state_dict."
                "get_state_dict, or save with torch.distributed.checkpoint",
            )


def _leaves(state: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, f"{place}.{key}".removeprefix("."))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        yield place, state


# ------------------------------------------------------------------ several processes


def _is_alone() -> bool:
    return not (distributed.is_available() and distributed.is_initialized())


def _rank() -> int:
    return 0 if _is_alone() else distributed.get_rank()


def _as_on_rank_0(paths: list[Path]) -> list[str]:
    """The names that rank 0 sees: it alone writes, and may have written since others looked."""
    names = [path.name for path in paths]
    if _is_alone():
        return names
    shared = [names]
    distributed.broadcast_object_list(shared, src=0)
    return shared[0]


def _first_problem(mine: str | None) -> str | None:
    """What the first rank says that has a problem; so none goes on before all have read."""
    if _is_alone():
        return mine
    everyone: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    said = [f"{theirs}, on rank {rank}" for rank, theirs in enumerate(everyone) if theirs]
    return said[0] if said else None
