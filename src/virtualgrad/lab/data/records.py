"""A data set as a record: files with their published sums, and the sources to ask for them.

A source opens into a reader, and the reader maps one `DataFile` to its content. Whatever comes back
is checked against the file's size and sum by the caller, so a source may hand over anything.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

__all__ = ["DataFile", "DataSet", "Reader", "Source", "Workspace"]


@dataclass(frozen=True)
class DataFile:
    """One file in the layout that the data folder keeps.

    Attributes:
        path: Where it lies in the data folder.
        size: Its length in bytes.
        algorithm: The name of the sum: "md5" or "sha1".
        digest: The published sum, in hexadecimal.
    """

    path: PurePosixPath
    size: int
    algorithm: str
    digest: str

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.name

    @property
    def sum_name(self) -> str:
        """The sum's name as people write it."""
        return {"md5": "MD5", "sha1": "SHA-1"}[self.algorithm]

    def damage(self, content: bytes) -> str | None:
        """Say in which way `content` is not this file's; None where it is."""
        if len(content) != self.size:
            return f"{len(content):,} bytes instead of {self.size:,}"
        digest = hashlib.new(self.algorithm, content, usedforsecurity=False).hexdigest()
        if digest != self.digest:
            return f"{self.sum_name} {digest} instead of {self.digest}"
        return None


@dataclass(frozen=True)
class Workspace:
    """Where a source may read and write while the data set is locked.

    Attributes:
        folder: The data folder, to read from.
        partial: A folder inside it for whatever is unfinished; it is removed afterwards.
        progress: Whether to draw progress bars.
    """

    folder: Path
    partial: Path
    progress: bool


Reader = Callable[[DataFile], bytes]


class Source(Protocol):
    """Somewhere a data set's files may come from."""

    @property
    def name(self) -> str:
        """The source in a few words, for messages."""

    def open(self, workspace: Workspace) -> AbstractContextManager[Reader]:
        """Make ready to read files; both this and the reader raise SourceError on failure."""


@dataclass(frozen=True)
class DataSet:
    """A data set: what it is called, the files it consists of, and the sources in their order.

    Attributes:
        name: The name users type.
        title: The name users read.
        files: Every file that must be present.
        sources: Says where missing files come from, first choice first.
        by_hand: Which files a user without network access can put into the data folder.
    """

    name: str
    title: str
    files: tuple[DataFile, ...]
    sources: Callable[[], tuple[Source, ...]]
    by_hand: str
