"""Files that are already there are used, in whichever known layout they are."""

import gzip
import pickle

import pytest

from virtualgrad.lab.data.datasets import DATASETS
from virtualgrad.lab.data.download import HttpArchive, HttpFiles
from virtualgrad.lab.data.errors import DataUnavailableError
from virtualgrad.lab.data.npm import NpmPackage
from virtualgrad.lab.data.sources import SOURCES
from virtualgrad.lab.data.store import obtain


def local(small):
    """The small data set with the real one's sources, less those that need a network."""
    sources = SOURCES[small.record.name]
    return small.asking(
        *(s for s in sources if not isinstance(s, HttpFiles | HttpArchive | NpmPackage))
    )


def test_the_order_is_folder_then_official_then_npm():
    for dataset in DATASETS.values():
        kinds = [type(source) for source in dataset.sources()]
        remote = [kind for kind in kinds if kind in (HttpFiles, HttpArchive, NpmPackage)]
        assert kinds[-len(remote) :] == remote
        assert kinds[-1] is NpmPackage and remote.count(NpmPackage) == 1


def test_our_own_layout_is_the_official_one(mnist, cifar10, tmp_path):
    for small in (mnist, cifar10):
        small.put(tmp_path)
        assert obtain(small.asking(), tmp_path) == small.contents
    assert not list(tmp_path.glob(".*"))  # reading needs neither lock nor leftovers


@pytest.mark.parametrize("parent", ["MNIST/raw", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_as_torchvision_or_a_user_leaves_it(mnist, tmp_path, parent, packed):
    folder = tmp_path / parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in mnist.contents.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    assert obtain(local(mnist), tmp_path) == mnist.contents
    assert obtain(mnist.asking(), tmp_path) == mnist.contents


def put_pickles(cifar10, folder, dumps):
    folder.mkdir()
    for batch, images in cifar10.images.items():
        flat = images.reshape(len(images), -1)
        labels = cifar10.labels[batch].tolist()
        content = {"batch_label": "b", "labels": labels, "data": flat, "filenames": ["f.png"]}
        (folder / batch).write_bytes(dumps(content))


@pytest.mark.filterwarnings("ignore")  # NumPy's reader, the oracle here, frowns on old pickles
def test_cifar10_pickles_of_python_2(cifar10, tmp_path, python2_pickle):
    folder = tmp_path / "cifar-10-batches-py"
    put_pickles(cifar10, folder, python2_pickle)
    oracle = pickle.loads((folder / "test_batch").read_bytes(), encoding="bytes")
    assert oracle[b"labels"] == cifar10.labels["test_batch"].tolist()
    assert oracle[b"data"].tobytes() == cifar10.images["test_batch"].tobytes()
    assert obtain(local(cifar10), tmp_path) == cifar10.contents
    assert obtain(cifar10.asking(), tmp_path) == cifar10.contents


def test_cifar10_archive_put_there_by_hand(cifar10, tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar10.tar())
    assert obtain(local(cifar10), tmp_path) == cifar10.contents


def test_a_damaged_archive_is_named(cifar10, tmp_path):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(b"no archive")
    with pytest.raises(DataUnavailableError, match=f"{archive} is damaged"):
        obtain(local(cifar10), tmp_path)


@pytest.mark.parametrize("half", [True, False])
def test_a_damaged_copy_is_named_and_the_next_one_used(mnist, tmp_path, caplog, half):
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for name, content in mnist.contents.items():
        (tmp_path / name).write_bytes(content)
    packed = gzip.compress(mnist.contents["train-images-idx3-ubyte"])
    broken = raw / "train-images-idx3-ubyte.gz"
    broken.write_bytes(packed[: len(packed) // 2] if half else gzip.compress(b"something else"))
    assert obtain(local(mnist), tmp_path) == mnist.contents
    assert "train-images-idx3-ubyte" in caplog.text and "is damaged" in caplog.text


def test_a_malicious_pickle_runs_nothing(cifar10, tmp_path, caplog):
    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    put_pickles(cifar10, tmp_path / "cifar-10-batches-py", lambda _: pickle.dumps(Attack()))
    with pytest.raises(DataUnavailableError, match=r"must not name io\.open"):
        obtain(local(cifar10), tmp_path)
    assert not (tmp_path / "harm").exists()
