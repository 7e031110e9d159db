"""What is known of one optimizer on one network, in one mode and number format: a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from virtualgrad.lab.bench.turns import lock_of
from virtualgrad.lab.record import RecordError, write_safely

SUMMARY = "summary.json"
SCALING = "scaling.json"
ENVIRONMENT = "environment.json"
MUST_AGREE = ("device", "torch", "cuda", "commit", "threads")
"""What two runs must have in common for their rows to stand in one table."""


@dataclass(frozen=True)
class Row:
    """One measurement. None is what was not, or could not be, measured.

    Attributes:
        model: Name of the network.
        mode: How the step was run.
        dtype: The number format.
        optimizer: Name of the optimizer.
        batch_size: Samples in a batch.
        parameters: How many numbers the parameters hold.
        ms: Milliseconds per step: the median over the rounds.
        ms_spread: Its interquartile range.
        ratio_to_sgd: The median over the rounds of the time over SGD's in the same round.
        ratio_spread: Its interquartile range.
        ratio_quartiles: The first and the third quartile.
        peak_bytes: Most memory in use during a step, other models' left out; eager, on a GPU.
        peak_ratio_to_sgd: Over SGD's.
        state_bytes: What the optimizer keeps between steps.
        state_per_parameter: The same in bytes per parameter.
        extra_bytes: What the optimizer must at least move beyond SGD, counted.
        floor_ratio: The least possible ratio: 1 + time to move those over SGD's time.
        flops: Of forward and backward, counted.
        steps_per_block: Steps in a timed block.
        error: Why there are no times.
    """

    model: str
    mode: str
    dtype: str
    optimizer: str
    batch_size: int
    parameters: int
    ms: float | None = None
    ms_spread: float | None = None
    ratio_to_sgd: float | None = None
    ratio_spread: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    peak_bytes: int | None = None
    peak_ratio_to_sgd: float | None = None
    state_bytes: int | None = None
    state_per_parameter: float | None = None
    extra_bytes: int | None = None
    floor_ratio: float | None = None
    flops: int | None = None
    steps_per_block: int | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from all others."""
        return self.model, self.mode, self.dtype, self.optimizer


class Results:
    """The rows of a folder, old and new; a row that is measured again replaces the old one.

    So a long benchmark can be made in several calls, network by network. Rows of another machine,
    or of another commit, are refused: they would not be comparable.

    Args:
        folder: Holds the files, or nothing yet.
        environment: Of the rows to come.
        name: Of the file of rows, ``SUMMARY`` or ``SCALING``.

    Raises:
        RecordError: What lies in the folder was not measured alike, or cannot be read.
    """

    def __init__(self, folder: Path, environment: dict[str, Any], name: str = SUMMARY) -> None:
        self.folder, self.environment, self.name = folder, environment, name
        self._rows: dict[tuple[str, ...], Row] = {}
        if (folder / name).exists():
            _require_agreement(load_environment(folder), environment, folder)
            self._rows = {row.key: row for row in load_rows(folder, name)}

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were first measured."""
        return list(self._rows.values())

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows in, and write everything, so that a kill loses nothing that was measured.

        What other calls have added in the meantime stays.
        """
        with FileLock(lock_of(self.folder, "rows")):
            if (self.folder / self.name).exists():
                self._rows |= {row.key: row for row in load_rows(self.folder, self.name)}
            self._rows |= {row.key: row for row in rows}
            write_safely(self.folder / ENVIRONMENT, json.dumps(self.environment, indent=1) + "\n")
            content = json.dumps([asdict(row) for row in self.rows], indent=1)
            write_safely(self.folder / self.name, content + "\n")


def load_rows(folder: Path, name: str = SUMMARY) -> list[Row]:
    """The rows of a folder; a file that holds none is named in the error."""
    with readable(folder / name) as path:
        return [Row(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def load_environment(folder: Path) -> dict[str, Any]:
    """Hardware, versions and settings of the rows of a folder."""
    with readable(folder / ENVIRONMENT) as path:
        return dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def readable(path: Path) -> Iterator[Path]:
    """Name the file in whatever goes wrong with reading it."""
    try:
        yield path
    except (OSError, ValueError, TypeError) as error:
        raise RecordError.of(
            given=f"{path}, which cannot be read ({error})",
            allowed=f"{path.name} as `virtualgrad bench` has written it",
            todo="measure again: virtualgrad bench --out DIR",
        ) from error


def _require_agreement(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    for name in MUST_AGREE:
        if old.get(name) != new.get(name):
            raise RecordError.of(
                given=f"the folder {folder}, measured with {name} {old.get(name)}",
                allowed=f"rows of one table all with {name} {new.get(name)}",
                todo="choose another folder by --out, or delete this one",
            )
