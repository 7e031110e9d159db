"""The data folder: every file is checked before use, and gets its name only once it is complete.

Reading needs no lock, because a file appears under its name in one step. Only who finds something
missing or damaged takes the lock of that data set and asks the sources; a second process waits, and
then finds the files there.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from virtualgrad.lab.data.datasets import DATASETS
from virtualgrad.lab.data.errors import (
    AbsentError,
    DataUnavailableError,
    SourceError,
    UnknownDataError,
)
from virtualgrad.lab.data.folder import DATA_VARIABLE, data_folder
from virtualgrad.lab.data.records import DataFile, DataSet, Reader, Source, Workspace

__all__ = ["dataset_named", "fetch", "obtain"]

log = logging.getLogger(__name__)


def fetch(name: str, folder: Path | None = None, progress: bool = True) -> Path:
    """Make sure that a data set is in the data folder, complete and undamaged.

    Args:
        name: "mnist" or "cifar10".
        folder: The data folder; `data_folder()` if None.
        progress: Draw progress bars, where standard error is a terminal.

    Returns:
        The folder that holds the data set's files.

    Raises:
        UnknownDataError: There is no data set of that name.
        DataUnavailableError: No source could deliver it; the text says why, source by source.
    """
    dataset = dataset_named(name)
    folder = folder or data_folder()
    obtain(dataset, folder, progress=progress)
    return folder / dataset.files[0].path.parent


def dataset_named(name: str) -> DataSet:
    """Look a data set up by the name users type."""
    if name not in DATASETS:
        raise UnknownDataError.of(
            given=f"data set {name!r}", allowed=", ".join(DATASETS), todo="name one of these"
        )
    return DATASETS[name]


def obtain(dataset: DataSet, folder: Path, *, progress: bool = True) -> dict[str, bytes]:
    """Return the checked content of every file of a data set, fetching what is missing.

    Args:
        dataset: The data set.
        folder: The data folder.
        progress: Draw progress bars, where standard error is a terminal.

    Raises:
        DataUnavailableError: No source could deliver it; the text says why, source by source.
    """
    contents, _ = _read_folder(dataset, folder)
    if len(contents) == len(dataset.files):
        return contents
    with _locked(dataset, folder) as partial:
        contents, failures = _read_folder(dataset, folder)
        for failure in failures:
            log.warning("%s; it is fetched again", failure)
        workspace = Workspace(folder, partial, progress)
        for source in dataset.sources():
            missing = [file for file in dataset.files if file.name not in contents]
            if not missing:
                break
            fresh, failed = _ask(source, missing, workspace)
            contents |= fresh
            failures += failed
    if len(contents) < len(dataset.files):
        raise _unavailable(dataset, folder, failures)
    return contents


def _read_folder(dataset: DataSet, folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Read the files that are there, and name those that are damaged."""
    contents, failures = {}, []
    for file in dataset.files:
        path = folder / file.path
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            failures.append(f"{path} cannot be read ({error})")
            continue
        if damage := file.damage(content):
            failures.append(f"{path} is damaged ({damage})")
        else:
            contents[file.name] = content
    return contents, failures


def _ask(
    source: Source, missing: list[DataFile], workspace: Workspace
) -> tuple[dict[str, bytes], list[str]]:
    """Take from one source what it has of the missing files, and say what went wrong there."""
    contents: dict[str, bytes] = {}
    failures: list[str] = []
    try:
        with source.open(workspace) as read:
            for file in missing:
                try:
                    contents[file.name] = _checked(read, file)
                except SourceError as error:
                    _note(failures, source, error)
                else:
                    _keep(contents[file.name], file, workspace)
    except SourceError as error:
        _note(failures, source, error)
    if contents:
        log.info("%s: %d of %d files, checked", source.name, len(contents), len(missing))
    return contents, failures


def _checked(read: Reader, file: DataFile) -> bytes:
    content = read(file)
    if damage := file.damage(content):
        raise SourceError(f"{file.name} is damaged ({damage})")
    return content


def _note(failures: list[str], source: Source, error: SourceError) -> None:
    failure = f"{source.name}: {error}"
    if failure not in failures:
        failures.append(failure)
        level = logging.DEBUG if isinstance(error, AbsentError) else logging.WARNING
        log.log(level, "%s", failure)


def _keep(content: bytes, file: DataFile, workspace: Workspace) -> None:
    """Write a checked file so that its name never stands for half of it."""
    unfinished = workspace.partial / file.name
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    path = workspace.folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.replace(path)


@contextmanager
def _locked(dataset: DataSet, folder: Path) -> Iterator[Path]:
    """Lock a data set, and lend a folder for unfinished files, rid of what a killed run left."""
    lock = FileLock(folder / f".{dataset.name}.lock")
    partial = folder / f".{dataset.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning("another process is fetching %s: waiting for it", dataset.title)
            lock.acquire()
    except OSError as error:
        raise _unavailable(
            dataset, folder, [f"the data folder cannot be written: {error}"]
        ) from error
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _unavailable(dataset: DataSet, folder: Path, failures: list[str]) -> DataUnavailableError:
    """Say the usual three things, but on lines of their own: the reasons are many."""
    lines = [
        f"given: {dataset.title} is not complete in {folder}, and cannot be fetched",
        *(f"  - {failure}" for failure in failures),
        f"allowed: {len(dataset.files)} files with the published sums",
        f"next step: go online, or put {dataset.by_hand}, into that folder, or name another one "
        f"with {DATA_VARIABLE}; virtualgrad.lab.data.load_digits() needs no files at all",
    ]
    return DataUnavailableError("\n".join(lines))
