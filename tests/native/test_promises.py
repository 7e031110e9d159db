"""What holds of eager passes holds with layers in C++: the tests of it, run once more with them.

Each file runs in a process of its own that finds the library where a user's would.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = (
    "optim/test_algorithm_oracle.py",
    "optim/test_bare_leaves.py",
    "optim/test_drop_in.py",
    "optim/test_fast_path.py",
    "optim/test_leaves.py",
    "optim/test_sgd_limit.py",
    "optim/test_short_ways.py",
    "optim/test_wrong_use.py",
    "promises/test_accumulation.py",
    "promises/test_autocast.py",
    "promises/test_autograd_grad.py",
    "promises/test_checkpointing.py",
    "promises/test_clipping.py",
    "promises/test_ddp.py",
    "promises/test_grad_scaler.py",
    "promises/test_groups.py",
    "promises/test_raw_parameters.py",
    "promises/test_retained_graphs.py",
    "promises/test_schedulers.py",
    "promises/test_several_backward.py",
    "promises/test_sync_batch_norm.py",
    "promises/test_zero_grad.py",
    "virtual/test_agreement.py",
    "virtual/test_attach.py",
    "virtual/test_closed_forms.py",
    "virtual/test_in_place_behind.py",
    "virtual/test_layer_norms.py",
    "virtual/test_marks.py",
    "virtual/test_refused_graphs.py",
    "virtual/test_threads.py",
    "virtual/test_unmarked_graphs.py",
    "virtual/test_unmarked_ops.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_once_more(file: str, cache: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
    done = subprocess.run(
        [*command, str(TESTS / file)],
        env={**os.environ, "TORCH_HOME": str(cache)},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
