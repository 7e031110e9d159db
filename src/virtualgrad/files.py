"""Files that a kill at any moment leaves whole, and saved states that show any change.

A file is written beside its place, brought to the disk, and then takes its place in one move. A
sealed state is a file of torch.save, followed by the SHA-256 of all its bytes: torch.load by itself
notices neither a changed byte nor all truncations (and reads a sealed file as any other).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from virtualgrad.errors import CheckpointError

DIGEST = hashlib.sha256().digest_size
PIECE = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of another when all has gone well.

    At ``path`` there is always either the old file or the new one. The permissions are those of
    any new file. A kill in the middle leaves a hidden file beside it that :func:`sweep` removes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _bring_to_disk(path.parent)


def sweep(path: Path) -> None:
    """Remove what killed writers of a file left beside it."""
    for left in path.parent.glob(f".{path.name}.*"):
        left.unlink(missing_ok=True)


def write_sealed(path: Path, state: object) -> None:
    """Write a state as a whole or not at all; refuse what could not be read again safely."""
    with replacing(path) as file:
        writer = _Digesting(file)
        torch.save(state, writer)  # type: ignore[arg-type] # it writes and flushes
        file.write(writer.digest.digest())
        file.seek(0)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if unsafe:
            raise CheckpointError.of(
                given=f"a state that holds {', '.join(sorted(unsafe))}, for {path.name}",
                allowed="tensors, numbers, texts, and lists, tuples and dicts of them: what "
                "torch.load reads with weights_only=True",
                todo="turn it into one of these, or name it to torch.serialization."
                "add_safe_globals before saving and before loading",
            )


def read_sealed(path: Path, map_location: Any = "cpu") -> Any:
    """Read a state; a file that is not byte for byte what was written is refused by name."""
    with path.open("rb") as file:  # one handle, so that what was checked is what is read
        size = os.fstat(file.fileno()).st_size - DIGEST
        if size < 0 or _digest(file, size) != file.read(DIGEST):
            raise CheckpointError.of(
                given=f"{path.name} ({size + DIGEST:,} bytes), which is truncated or altered",
                allowed="a file as it was written: its last bytes are the SHA-256 of all others",
                todo="use an earlier one, or copy the file again from where it is whole",
            )
        file.seek(0)
        return torch.load(file, map_location=map_location, weights_only=True)


class _Digesting:
    """Writes to a file, and keeps the digest of what it has written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def _digest(file: IO[bytes], size: int) -> bytes:
    """SHA-256 of so many bytes, a piece at a time: a state may be as large as the memory."""
    digest = hashlib.sha256()
    while piece := file.read(min(size, PIECE)):
        digest.update(piece)
        size -= len(piece)
    return digest.digest()


def _bring_to_disk(folder: Path) -> None:
    """Have the move itself outlast a loss of power, where the system can say so."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
