"""The layers in C++, built once for all test processes, as a user builds them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from virtualgrad import native
from virtualgrad.native.building import COMPILERS
from virtualgrad.native.load import forget
from virtualgrad.native.place import library

CACHE = "TORCH_HOME"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the library in it; workers of one run share it."""
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler here")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as environment, FileLock(shared / "native.lock"):
        environment.setenv(CACHE, str(shared / "cache"))
        if not library().is_file():
            native.build()
    return shared / "cache"


@pytest.fixture
def in_cpp(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are nodes of C++."""
    monkeypatch.setenv(CACHE, str(cache))
    forget()
    assert native.built() is not None
    yield
    monkeypatch.undo()
    forget()
