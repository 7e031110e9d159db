"""Images and labels as tensors, from checked files or from the digits embedded here.

The embedded digits are the "Optical Recognition of Handwritten Digits" of E. Alpaydin and C. Kaynak
(UCI Machine Learning Repository, CC BY 4.0), as scikit-learn ships them: 1,797 images of 8 x 8
pixels with values 0..16. They stand in for MNIST where there is no network at all.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from virtualgrad.lab.data.folder import data_folder
from virtualgrad.lab.data.store import dataset_named, obtain

__all__ = ["ImageData", "load_cifar10", "load_digits", "load_mnist"]

DIGITS_TRAIN = 1_297  # leaves 500 to test on


@dataclass(frozen=True)
class ImageData:
    """A data set in memory.

    Attributes:
        name: What the data set is called in tables and records.
        source: Where it comes from, in a line.
        train_images: (N, C, H, W), uint8.
        train_labels: (N,), int64, 0..9.
        test_images: (M, C, H, W), uint8.
        test_labels: (M,), int64, 0..9.
    """

    name: str
    source: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_mnist(folder: Path | None = None) -> ImageData:
    """Load MNIST, fetching it first where it is missing: 60,000 and 10,000 images, 1 x 28 x 28.

    Args:
        folder: The data folder; `data_folder()` if None.

    Raises:
        DataUnavailableError: It is not there and no source could deliver it.
    """
    contents = obtain(dataset_named("mnist"), folder or data_folder())
    return ImageData(
        name="MNIST",
        source="the four original idx files, MD5 checked",
        train_images=_idx(contents["train-images-idx3-ubyte"]).unsqueeze(1),
        train_labels=_idx(contents["train-labels-idx1-ubyte"]).long(),
        test_images=_idx(contents["t10k-images-idx3-ubyte"]).unsqueeze(1),
        test_labels=_idx(contents["t10k-labels-idx1-ubyte"]).long(),
    )


def load_cifar10(folder: Path | None = None) -> ImageData:
    """Load CIFAR-10, fetching it first where it is missing: 50,000 and 10,000 images, 3 x 32 x 32.

    Args:
        folder: The data folder; `data_folder()` if None.

    Raises:
        DataUnavailableError: It is not there and no source could deliver it.
    """
    contents = obtain(dataset_named("cifar10"), folder or data_folder())
    train = [_records(contents[f"data_batch_{batch}.bin"]) for batch in range(1, 6)]
    test_images, test_labels = _records(contents["test_batch.bin"])
    return ImageData(
        name="CIFAR-10",
        source="the six official binary files, SHA-1 checked",
        train_images=torch.cat([images for images, _ in train]),
        train_labels=torch.cat([labels for _, labels in train]),
        test_images=test_images,
        test_labels=test_labels,
    )


def load_digits() -> ImageData:
    """Load the embedded digits: 1,297 images to train on and 500 to test on, 1 x 8 x 8.

    Pixels are stretched from 0..16 to 0..255. This is not MNIST, and its name says so.
    """
    with (
        resources.files(__package__).joinpath("digits.npz").open("rb") as stream,
        np.load(stream, allow_pickle=False) as archive,
    ):
        raw, labels = torch.tensor(archive["images"]).int(), torch.tensor(archive["labels"]).long()
    images = ((raw * 255 + 8) // 16).to(torch.uint8).unsqueeze(1)
    return ImageData(
        name="digits (embedded)",
        source="UCI optical recognition of handwritten digits, as in scikit-learn; not MNIST",
        train_images=images[:DIGITS_TRAIN],
        train_labels=labels[:DIGITS_TRAIN],
        test_images=images[DIGITS_TRAIN:],
        test_labels=labels[DIGITS_TRAIN:],
    )


def _idx(content: bytes) -> Tensor:
    """Read an idx file: two zeros, the type (8 = uint8), how many sizes, the sizes, the values."""
    ndim = content[3]
    shape = np.frombuffer(content, ">u4", ndim, offset=4).tolist()
    return _owned(np.frombuffer(content, np.uint8, offset=4 + 4 * ndim)).reshape(shape)


def _records(content: bytes) -> tuple[Tensor, Tensor]:
    """Split CIFAR-10's records, a label byte and 3,072 pixel bytes each, into images and labels."""
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return _owned(records[:, 1:]).reshape(-1, 3, 32, 32), _owned(records[:, 0]).long()


def _owned(values: npt.NDArray[np.uint8]) -> Tensor:
    """Copy out of the read-only bytes, which a tensor must not share."""
    return torch.from_numpy(values.copy())
