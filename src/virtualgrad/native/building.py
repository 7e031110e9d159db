"""Building the library: one call of a C++ compiler, with the headers that come with torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from virtualgrad.errors import NativeBuildError
from virtualgrad.native.load import forget
from virtualgrad.native.place import MODULE, SOURCE, library, outdated

COMPILERS = ("c++", "g++", "clang++")
LIBRARIES = ("torch", "torch_cpu", "c10", "torch_python")


def build() -> Path:
    """Build the library of ``module.cpp`` for this torch, and return the file of the library.

    It takes about a minute, and lies beside torch's own caches, under ``~/.cache/torch`` as a rule.
    Layers that are run for the first time from then on use it, in this process and in later ones.

    Raises:
        NativeBuildError: there is no compiler, or it failed; what it said is in the message.
    """
    path = library()
    try:
        _build_into(path)
        for old in outdated():
            old.unlink(missing_ok=True)
    except OSError as error:
        raise NativeBuildError.of(
            given=f"{path.parent}, into which nothing can be written ({error})",
            allowed="a folder for torch's caches that can be written to",
            todo="set TORCH_HOME to one, here and where you train",
        ) from error
    forget()
    return path


def _build_into(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        made = Path(beside) / path.name
        command = _command(made)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NativeBuildError.of(
                given=f"{command[0]}, which failed:\n{_beginning(done.stderr)}",
                allowed="a compiler of C++20 with the headers of Python (python3-dev, say)",
                todo="install them, or set CXX to another compiler; without the library all works "
                "as before, more slowly in short steps",
            )
        os.replace(made, path)  # a process that starts now finds all of it, or nothing


def _command(into: Path) -> list[str]:
    """The call of the compiler."""
    here = Path(torch.__file__).parent
    libraries = here / "lib"
    include = [here / "include", Path(sysconfig.get_paths()["include"])]
    return [
        *_compiler(),
        *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"),
        "-ffp-contract=off",  # every product and every sum is rounded, as it is written
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(word for folder in include for word in ("-isystem", str(folder))),
        str(SOURCE),
        *("-o", str(into), f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
        *(f"-l{name}" for name in LIBRARIES),
    ]


def _compiler() -> list[str]:
    """The compiler, with options that CXX may give it, or the first that is there."""
    if not sys.platform.startswith("linux"):
        raise NativeBuildError.of(
            given=f"a build on {sys.platform}",
            allowed="Linux, for which it is written and tested",
            todo="do without the library: all works, more slowly in short steps",
        )
    named = os.environ.get("CXX")
    for words in [shlex.split(named)] if named else [[name] for name in COMPILERS]:
        found = shutil.which(words[0])
        if found is not None:
            return [found, *words[1:]]
    raise NativeBuildError.of(
        given=f"no compiler of C++ ({named or ', '.join(COMPILERS)})",
        allowed="one on the PATH, or named by CXX",
        todo="install one (g++, say); without the library all works, more slowly in short steps",
    )


def _beginning(text: str, lines: int = 20) -> str:
    """The first lines of what a compiler said: what follows comes of them."""
    return "\n".join(text.strip().splitlines()[:lines])
