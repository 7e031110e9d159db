"""What a run leaves behind: one JSON file with its settings, environment and learning curve.

A record is written after every evaluation, to a temporary file that then takes the old one's
place, so that a kill at any moment leaves a valid file.
"""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from virtualgrad.errors import VirtualGradError
from virtualgrad.files import replacing

FORMAT = 1


class RecordError(VirtualGradError, ValueError):
    """A file that is not a record of a run."""


@dataclass
class Curve:
    """The learning curve: one entry per evaluation; errors in percent."""

    step: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_error: list[float] = field(default_factory=list)


@dataclass
class Record:
    """One training run.

    Attributes:
        recipe: name of the recipe, such as ``"resnet20"``.
        optimizer: name of the optimizer in the recipe, such as ``"svgd"``.
        seed: seed of initial weights, order of samples and augmentation.
        settings: everything else that was set, as plain data.
        environment: versions, hardware, commit and date.
        data: name and source of the data set.
        curve: the learning curve.
        ms_per_step: mean wall-clock time of a training step, evaluation left out.
        peak_memory_bytes: of the device; None where it is not known.
        state_bytes: memory that the optimizer's state takes.
        finished: whether the run reached its last step.
    """

    recipe: str
    optimizer: str
    seed: int
    settings: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, str]
    curve: Curve = field(default_factory=Curve)
    ms_per_step: float | None = None
    peak_memory_bytes: int | None = None
    state_bytes: int = 0
    finished: bool = False
    format: int = FORMAT

    @property
    def final_error(self) -> float:
        """The last test error, in percent."""
        return self.curve.test_error[-1]

    @property
    def lowest_error(self) -> float:
        """The lowest test error along the run, in percent: what the paper's tables give."""
        return min(self.curve.test_error)

    @property
    def file_name(self) -> str:
        """Name of the file that the record is kept in."""
        return f"{self.recipe}-{self.optimizer}-seed{self.seed}.json"

    def save(self, folder: Path) -> Path:
        """Write the record into a folder; an older one is replaced as a whole."""
        path = folder / self.file_name
        write_safely(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record; a file that is none is named in the error."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            curve = Curve(**fields.pop("curve"))
            record = cls(curve=curve, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordError.of(
                given=f"{path.name}, which cannot be read as a record ({error})",
                allowed=f"a JSON file of format {FORMAT} that a run has written",
                todo="delete the file and repeat the run",
            ) from error
        if record.format != FORMAT:
            raise RecordError.of(
                given=f"{path.name} of format {record.format}",
                allowed=f"format {FORMAT}",
                todo="repeat the run with this version of virtualgrad",
            )
        return record


def load_records(folder: Path) -> list[Record]:
    """All records of a folder, in the order of their names."""
    paths = sorted(folder.glob("*-seed*.json"))
    if not paths:
        raise RecordError.of(
            given=f"the folder {str(folder)!r}, "
            + ("without records of runs" if folder.exists() else "which does not exist"),
            allowed="a folder with files such as mlp-svgd-seed0.json",
            todo="run `virtualgrad reproduce` with --out set to it first",
        )
    return [Record.load(path) for path in paths]


def write_safely(path: Path, content: str | bytes) -> None:
    """Replace a file by a new one, so that it is always either the old or the new one.

    A text is written as UTF-8.
    """
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, commit and date, for a record."""
    from virtualgrad import __version__  # noqa: PLC0415 - the package imports the lab nowhere

    on_gpu = device.type == "cuda"
    return {
        "virtualgrad": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "platform": platform.platform(terse=True),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of the source tree, if it is one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
