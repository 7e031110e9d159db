"""The second source: the official downloads, given up on quickly where they cannot be reached.

Before anything is downloaded the server is asked for an answer, within a few seconds in all. A
machine without a way out thus loses seconds, even where looking up a name hangs, which no timeout
of a connection covers.
"""

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pooch  # type: ignore[import-untyped]

from virtualgrad.lab.data.errors import SourceError
from virtualgrad.lab.data.progress import DownloadBar
from virtualgrad.lab.data.records import DataFile, Reader, Workspace
from virtualgrad.lab.data.unpack import damage_named, gunzip, open_archive

__all__ = ["HttpArchive", "HttpFiles"]

log = logging.getLogger(__name__)

ANSWER_SECONDS = 4.0  # for the name, the connection and the first answer together
STALL_SECONDS = 20.0  # without one byte in a running download
ATTEMPTS = 2
CHUNK = 1 << 18


@dataclass(frozen=True)
class HttpFiles:
    """One download per file, compressed with gzip.

    Attributes:
        mirror: The address to which `name.gz` is added.
    """

    mirror: str

    @property
    def name(self) -> str:
        """The source in a few words."""
        return f"official download from {urlsplit(self.mirror).netloc}"

    @contextmanager
    def open(self, workspace: Workspace) -> Iterator[Reader]:
        """See that the mirror answers."""
        require_answer(self.mirror)

        def read(file: DataFile) -> bytes:
            path = download(f"{self.mirror}{file.name}.gz", workspace)
            with damage_named(path.name):
                return gunzip(path.read_bytes(), file)

        yield read


@dataclass(frozen=True)
class HttpArchive:
    """One download that holds all files, as a tar archive, under their own paths.

    Attributes:
        url: The archive's address.
    """

    url: str

    @property
    def name(self) -> str:
        """The source in a few words."""
        return f"official download from {urlsplit(self.url).netloc}"

    @contextmanager
    def open(self, workspace: Workspace) -> Iterator[Reader]:
        """Download the archive and open it."""
        require_answer(self.url)
        path = download(self.url, workspace)
        with open_archive(path, path.name) as member:
            yield lambda file: member(str(file.path))


def require_answer(url: str, seconds: float = ANSWER_SECONDS) -> None:
    """Raise SourceError unless the server of `url` answers at all within `seconds`."""
    failures: list[str] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            pooch.HTTPDownloader(timeout=seconds)(url, None, None, check_only=True)
            failures.clear()
        except (OSError, ValueError) as error:  # requests derives its errors from both
            failures[:] = [_briefly(error)]

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if failures:
        raise SourceError(f"not reachable ({failures[0]})")


def download(url: str, workspace: Workspace) -> Path:
    """Download `url` into the workspace's folder for unfinished files; try again if cut off."""
    path = workspace.partial / url.rpartition("/")[2]
    for attempt in range(1, ATTEMPTS + 1):
        log.info("downloading %s", url)
        try:
            with DownloadBar(path.name, enabled=workspace.progress) as bar:
                pooch.HTTPDownloader(
                    progressbar=bar, chunk_size=CHUNK, timeout=(ANSWER_SECONDS, STALL_SECONDS)
                )(url, str(path), None)
        except (OSError, ValueError) as error:
            reason = _briefly(error)
            log.warning("%s failed, attempt %d of %d (%s)", url, attempt, ATTEMPTS, reason)
        else:
            return path
    raise SourceError(f"{path.name} failed {ATTEMPTS} times ({reason})")


def _briefly(error: BaseException) -> str:
    """Find the plain cause under the layers that requests and urllib3 wrap around it."""
    cause = error.args[0] if error.args else type(error).__name__
    cause = getattr(cause, "reason", cause)
    if isinstance(cause, BaseException):
        return _briefly(cause)
    # urllib3 opens with the connection object: "HTTPSConnection(host=..., port=443): Failed to ..."
    return re.sub(r"^HTTPS?Connection.*?\): ", "", cause if isinstance(cause, str) else str(error))
