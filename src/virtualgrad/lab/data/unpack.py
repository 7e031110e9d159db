"""Content out of containers: gzip files, tar archives, CIFAR-10's pickles and PNG batches.

CIFAR-10's official binary record is one label byte, then the 1,024 bytes each of the red, green and
blue plane, row by row. Pickles and PNG batches are rebuilt into such records, because the published
sums are of those.
"""

import gzip
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from virtualgrad.lab.data.errors import SourceError
from virtualgrad.lab.data.records import DataFile

__all__ = ["batch_records", "damage_named", "gunzip", "open_archive", "png_records"]

# What the decoders below raise on bad input; Pillow reports a broken PNG as a SyntaxError.
DECODING_ERRORS = (
    EOFError,
    KeyError,
    OSError,
    SyntaxError,
    ValueError,
    pickle.UnpicklingError,
    tarfile.TarError,
    zlib.error,
)


@contextmanager
def damage_named(origin: str) -> Iterator[None]:
    """Turn whatever a decoder raises into a SourceError that names the damaged file."""
    try:
        yield
    except SourceError:
        raise
    except DECODING_ERRORS as error:
        raise SourceError(f"{origin} is damaged ({str(error) or type(error).__name__})") from error


def gunzip(content: bytes, file: DataFile) -> bytes:
    """Decompress; content that is not compressed passes, since some servers unpack on the way."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    with gzip.open(io.BytesIO(content)) as stream:
        return stream.read(file.size + 1)  # enough to see that it is too long


@contextmanager
def open_archive(path: Path, origin: str) -> Iterator[Callable[[str], bytes]]:
    """Open a tar archive into a function that reads one member; nothing is unpacked to disk.

    Args:
        path: The archive.
        origin: What to call it in messages.
    """
    with ExitStack() as stack:
        with damage_named(origin):
            archive = stack.enter_context(tarfile.open(path))

        def member(name: str) -> bytes:
            with damage_named(f"{name} in {origin}"):
                stream = archive.extractfile(name)
                if stream is None:
                    raise KeyError("it is no file")
                with stream:
                    return stream.read()

        yield member


def png_records(png: bytes, labels: bytes, batch: int) -> bytes:
    """Rebuild records from a PNG whose every row is one image, its RGB pixels row by row.

    Args:
        png: The picture, as many rows as images and 1,024 pixels wide.
        labels: A JSON list of the labels of all batches.
        batch: Which batch of labels to take, counted from 0.
    """
    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture)  # (images, 1024, 3)
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
    first = batch * len(pixels)
    return _records(np.array(json.loads(labels)[first : first + len(pixels)], np.uint8), planes)


def batch_records(content: bytes, file: DataFile) -> bytes:
    """Rebuild records from one pickled batch of `cifar-10-batches-py`, running nothing in it."""
    del file
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="bytes").load()
        labels, planes = batch[b"labels"], batch[b"data"].content
    except Exception as error:  # a damaged pickle can raise anything at all
        raise ValueError(f"not a pickled batch: {error}") from error
    pixels = np.frombuffer(planes, np.uint8).reshape(len(labels), -1)
    return _records(np.array(labels, np.uint8), pixels)


def _records(labels: npt.NDArray[np.uint8], planes: npt.NDArray[np.uint8]) -> bytes:
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()


class _PickledArray:
    """Stands in for the array of a batch (and for its dtype): keeps the raw bytes, runs nothing."""

    content: bytes

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.content = state[-1]  # (version, shape, dtype, Fortran order, raw bytes)


class _BatchUnpickler(pickle.Unpickler):
    """Knows the three names a batch uses, and maps each to a stand-in that cannot do harm."""

    NAMES = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module: str, name: str) -> type[_PickledArray]:
        """Return the stand-in; refuse every name that a batch has no use for."""
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"a batch of images must not name {module}.{name}")
        return _PickledArray
