"""Runs the functions ``check_*`` of a test file with Triton's interpreter, on the CPU.

Triton must know so when it is imported: they run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed here")


def run_checks(file: str) -> None:
    """Run the checks of a file; fails with their output.

    What they cover is counted, where it is in this process: kernels run nowhere else in CI.
    """
    command = [sys.executable]
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        command += ["-m", "coverage", "run", "--parallel-mode"]
    command += ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "no:pytest_cov", "-o", "python_functions=check_*", file]
    root = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_"))}
    environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "passed" in run.stdout
