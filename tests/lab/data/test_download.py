"""Official downloads: checked, tried again when cut off, and given up on quickly."""

import io
import socket
import tarfile
import threading

import pytest
from rich.console import Console

from virtualgrad.lab.data import download, progress
from virtualgrad.lab.data.download import HttpArchive, HttpFiles, require_answer
from virtualgrad.lab.data.errors import DataUnavailableError, SourceError
from virtualgrad.lab.data.progress import DownloadBar
from virtualgrad.lab.data.store import obtain

TRAIN = "train-images-idx3-ubyte"


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_compressed_files(mnist, server, tmp_path):
    dataset = mnist.asking(HttpFiles(server.offer(mnist)))
    assert obtain(dataset, tmp_path) == mnist.contents
    assert obtain(mnist.asking(), tmp_path) == mnist.contents
    assert sorted(server.asked) == sorted(f"/{name}.gz" for name in mnist.contents)


def test_a_server_that_unpacks_on_the_way(mnist, server, tmp_path):
    server.paths = {f"/{name}.gz": content for name, content in mnist.contents.items()}
    assert obtain(mnist.asking(HttpFiles(f"{server.url}/")), tmp_path) == mnist.contents


def test_one_archive(cifar10, server, tmp_path):
    server.paths["/all.tar.gz"] = cifar10.tar()
    dataset = cifar10.asking(HttpArchive(f"{server.url}/all.tar.gz"))
    assert obtain(dataset, tmp_path) == cifar10.contents
    assert server.asked == {"/all.tar.gz": 1}


def test_an_archive_without_the_files(cifar10, server, tmp_path, tar_of):
    server.paths["/all.tar.gz"] = tar_of({"readme": b"nothing here"})
    with pytest.raises(DataUnavailableError, match=r"test_batch\.bin in all\.tar\.gz is damaged"):
        obtain(cifar10.asking(HttpArchive(f"{server.url}/all.tar.gz")), tmp_path)


def test_an_archive_with_a_folder_in_place_of_a_file(cifar10, server, tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for file in cifar10.record.files:
            member = tarfile.TarInfo(str(file.path))
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
    server.paths["/all.tar"] = stream.getvalue()
    with pytest.raises(DataUnavailableError, match="it is no file"):
        obtain(cifar10.asking(HttpArchive(f"{server.url}/all.tar")), tmp_path)


def test_only_missing_files_are_downloaded(mnist, server, tmp_path):
    mnist.put(tmp_path)
    (tmp_path / "MNIST/raw" / TRAIN).unlink()
    assert obtain(mnist.asking(HttpFiles(server.offer(mnist))), tmp_path) == mnist.contents
    assert server.asked == {f"/{TRAIN}.gz": 1}


def test_a_download_cut_off_is_tried_again(mnist, server, tmp_path, caplog):
    dataset = mnist.asking(HttpFiles(server.offer(mnist)))
    server.cut[f"/{TRAIN}.gz"] = 1
    assert obtain(dataset, tmp_path) == mnist.contents
    assert f"{TRAIN}.gz failed, attempt 1 of 2" in caplog.text


def test_a_download_always_cut_off_leaves_nothing(mnist, server, tmp_path):
    dataset = mnist.asking(HttpFiles(server.offer(mnist)))
    server.cut[f"/{TRAIN}.gz"] = 99
    with pytest.raises(DataUnavailableError, match=rf"{TRAIN}\.gz failed 2 times"):
        obtain(dataset, tmp_path)
    assert not (tmp_path / "MNIST/raw" / TRAIN).exists()
    assert not list(tmp_path.rglob("*partial*"))


def test_a_wrong_file_is_named_and_the_next_mirror_asked(mnist, server, tmp_path, caplog):
    bad, good = (HttpFiles(server.offer(mnist, folder)) for folder in ("bad/", "good/"))
    server.paths[f"/bad/{TRAIN}.gz"] = mnist.contents["t10k-images-idx3-ubyte"]
    assert obtain(mnist.asking(bad, good), tmp_path) == mnist.contents
    assert f"{TRAIN} is damaged" in caplog.text
    assert [path for path in server.asked if path.startswith("/good")] == [f"/good/{TRAIN}.gz"]


def test_a_file_the_server_lacks(mnist, server, tmp_path):
    dataset = mnist.asking(HttpFiles(server.offer(mnist)))
    del server.paths[f"/{TRAIN}.gz"]
    with pytest.raises(DataUnavailableError, match="404 Client Error"):
        obtain(dataset, tmp_path)


def test_a_closed_port_is_given_up_on_at_once(server, mnist, tmp_path):
    dataset = mnist.asking(HttpFiles(f"http://127.0.0.1:{closed_port()}/"))
    with pytest.raises(DataUnavailableError, match=r"not reachable \(.*[Rr]efused"):  # no wait
        obtain(dataset, tmp_path)


def test_a_silent_server_is_given_up_on_quickly(server):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(SourceError, match="not reachable"):  # it would wait for ever
            require_answer(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=0.3)


def test_a_hanging_name_lookup_is_given_up_on_quickly(server, monkeypatch):
    released = threading.Event()

    def hang(*_, **__):
        released.wait(60)
        raise socket.gaierror("released")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    threads = set(threading.enumerate())
    with pytest.raises(SourceError, match=r"no answer within 0\.2 s"):  # and not "released"
        require_answer("http://some.invalid/", seconds=0.2)
    released.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join()


def test_the_bar_knows_the_size_once_the_server_said_it():
    with DownloadBar("file", enabled=False) as bar:
        assert bar.total is None
        bar.total = 0  # no Content-Length
        assert bar.total is None
        bar.total = 7
        assert bar.total == 7


def test_the_bar_fills_on_a_terminal(mnist, server, tmp_path, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "console", terminal)
    monkeypatch.setattr(download, "CHUNK", 512)
    dataset = mnist.asking(HttpFiles(server.offer(mnist)))
    obtain(dataset, tmp_path / "shown")
    size = len(server.paths[f"/{TRAIN}.gz"]) / 1000
    assert f"{TRAIN}.gz" in screen.getvalue() and f"{size:.1f}/{size:.1f} kB" in screen.getvalue()
    screen.truncate(0)
    obtain(dataset, tmp_path / "hidden", progress=False)
    assert screen.getvalue() == ""
