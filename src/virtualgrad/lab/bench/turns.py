"""Several calls at once: they make their models side by side, and take turns at measuring.

Compilation takes minutes of one core each, and a timing wants the machine for itself. So calls that
share a folder share a lock: as many as like may be making, but one alone measures, and only while
nobody makes anything. Who lets libraries choose their kernels by trial does so alone as well, but
beside others who make: a compiler leaves the GPU idle, and to wait for all of them would take long.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows, where calls are made one after the other
    fcntl = None  # type: ignore[assignment]


def lock_of(folder: Path, what: str) -> Path:
    """The file to lock for a folder: beside the machine's temporary files, not among results."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"virtualgrad-bench-{digest}-{what}.lock"


class Turns:
    """The turns of the calls that share a folder; of one alone, without a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    @contextmanager
    def making(self) -> Iterator[None]:
        """Make, warm up and look at memory, beside others who do so."""
        with self._locked(alone=False):
            yield

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Try kernels, as the only one who does, beside others who make."""
        with self._locked(alone=False), self._locked("choices", alone=True):
            yield

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure, alone."""
        with self._locked(alone=True):
            yield

    @contextmanager
    def _locked(self, what: str = "turns", *, alone: bool) -> Iterator[None]:
        if self.folder is None or fcntl is None:
            yield
            return
        # Closing the file, however we end, unlocks it.
        with lock_of(self.folder, what).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
