"""Building and loading the layers in C++: what is there, and what a user is told if it is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD, native
from virtualgrad.errors import NativeBuildError
from virtualgrad.native import place
from virtualgrad.native.load import forget
from virtualgrad.native.place import library


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    forget()
    yield
    monkeypatch.undo()
    forget()


def trained() -> tuple[str, Tensor]:
    """The node of a layer, and its weight behind two steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with SVGD(model, 0.1) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            sigma = model(torch.randn(4, 3))
            sigma.square().mean().backward()
            optimizer.step()
    assert sigma.grad_fn is not None
    return sigma.grad_fn.name(), model.weight.detach()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "virtualgrad.native", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("in_cpp")
def test_a_library_is_used_until_it_is_switched_off() -> None:
    name, ours = trained()
    assert name == "torch::autograd::CppNode<virtualgrad::Linear>"
    native.use(False)
    try:
        name, theirs = trained()
    finally:
        native.use(True)
    assert name == "LinearBackward"
    assert torch.equal(ours, theirs)
    told = run_command("--status")
    assert told.returncode == 0
    assert f"built for torch {torch.__version__}" in told.stdout


@pytest.mark.usefixtures("nothing_built")
def test_without_a_library_layers_are_nodes_of_python() -> None:
    assert native.built() is None
    assert trained()[0] == "LinearBackward"
    told = run_command("--status")
    assert told.returncode == 1 and told.stdout.startswith("not built for torch")


@pytest.mark.usefixtures("nothing_built")
def test_a_damaged_library_is_told_of_once_and_done_without() -> None:
    library().parent.mkdir(parents=True)
    library().write_bytes(b"not a library")
    with pytest.warns(UserWarning, match="cannot be loaded .* python -m virtualgrad.native"):
        assert trained()[0] == "LinearBackward"
    assert trained()[0] == "LinearBackward"  # warnings are errors here: no second one


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize("missing", ["sources", "a home that can be read"])
def test_what_nobody_asked_for_fails_nowhere(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> Path:
        raise PermissionError("not yours")

    if missing == "sources":
        monkeypatch.setattr(place, "FOLDER", Path("nowhere"))
    else:
        monkeypatch.setattr("virtualgrad.native.load.library", unreadable)
    assert trained()[0] == "LinearBackward"


@pytest.mark.usefixtures("nothing_built")
def test_a_new_library_takes_the_place_of_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    monkeypatch.setenv("CXX", f"sh {compiler}")  # words, as in "ccache g++"
    library().parent.mkdir(parents=True)
    beginning = library().name.rpartition("-")[0]
    old, of_another = library().with_name(f"{beginning}-0.so"), library().with_name("other-0.so")
    old.touch()
    of_another.touch()
    assert native.build() == library()
    assert {*library().parent.iterdir()} == {library(), of_another}


def test_a_cache_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", "/proc/nowhere")
    with pytest.raises(NativeBuildError, match=r"nothing can be written .* set TORCH_HOME"):
        native.build()


@pytest.mark.usefixtures("nothing_built")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeBuildError, match=r"no compiler of C\+\+ \(no-such-compiler\)"):
        native.build()
    told = run_command()
    assert told.returncode == 1 and "no-such-compiler" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.usefixtures("nothing_built")
def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "failing"
    compiler.write_text("#!/bin/sh\necho 'layers.h:1: error: no Python.h' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeBuildError, match=r"error: no Python\.h.*headers of Python"):
        native.build()
    assert list(library().parent.iterdir()) == []


def test_a_system_for_which_it_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(NativeBuildError, match="a build on win32; allowed: Linux"):
        native.build()
