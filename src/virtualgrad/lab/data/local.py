"""The first source: files that the data folder holds already, in another layout than ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from virtualgrad.lab.data.errors import AbsentError
from virtualgrad.lab.data.records import DataFile, Reader, Workspace
from virtualgrad.lab.data.unpack import damage_named, gunzip, open_archive

__all__ = ["BesideFiles", "LocalArchive"]


@dataclass(frozen=True)
class BesideFiles:
    """One file of the data folder per file wanted.

    Attributes:
        layout: The path in the data folder; `{name}` and `{stem}` stand for the wanted file's.
        decode: Turns what lies there into the wanted file's content.
    """

    layout: str
    decode: Callable[[bytes, DataFile], bytes] = gunzip

    @property
    def name(self) -> str:
        """The source in a few words."""
        return f"{self.layout.format(name='*', stem='*')} in the data folder"

    @contextmanager
    def open(self, workspace: Workspace) -> Iterator[Reader]:
        """Read from the data folder."""

        def read(file: DataFile) -> bytes:
            stem = PurePosixPath(file.name).stem
            path = workspace.folder / self.layout.format(name=file.name, stem=stem)
            if not path.is_file():
                raise AbsentError("no such file")
            with damage_named(str(path)):
                return self.decode(path.read_bytes(), file)

        yield read


@dataclass(frozen=True)
class LocalArchive:
    """A tar archive in the data folder that holds the files under their own paths.

    Attributes:
        path: The archive's path in the data folder.
    """

    path: str

    @property
    def name(self) -> str:
        """The source in a few words."""
        return f"{self.path} in the data folder"

    @contextmanager
    def open(self, workspace: Workspace) -> Iterator[Reader]:
        """Open the archive, where there is one."""
        path = workspace.folder / self.path
        if not path.is_file():
            raise AbsentError("no such file")
        with open_archive(path, str(path)) as member:
            yield lambda file: member(str(file.path))
