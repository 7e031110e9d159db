"""``python -m virtualgrad.native``: build the nodes of C++, once for each torch."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from virtualgrad.errors import NativeBuildError
from virtualgrad.native import build, built
from virtualgrad.native.place import library


def main() -> int:
    """Build, or say what there is; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m virtualgrad.native",
        description="Build virtualgrad's layers in C++ for the torch that is installed. Eager "
        "steps that wait for the host take less time with them, and compute the same. It takes a "
        "C++ compiler and about a minute, once for each torch.",
    )
    parser.add_argument("--status", action="store_true", help="only say whether they are built")
    if parser.parse_args().status:
        is_built = built() is not None
        print(f"{'built' if is_built else 'not built'} for torch {torch.__version__}: {library()}")
        return 0 if is_built else 1
    print(f"building for torch {torch.__version__}: about a minute ...", flush=True)
    begin = time.perf_counter()
    try:
        path = build()
    except NativeBuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"built in {time.perf_counter() - begin:.0f} s: {path}")
    return 0 if built() is not None else 1


if __name__ == "__main__":
    sys.exit(main())
