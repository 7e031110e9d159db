"""Promise 6: torchrun restarts a job whose ranks are killed, and it ends as if none had been."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"


def torchrun(folder: Path, *options: str) -> tuple[str, Any]:
    """What the example says on two processes, and the last state that it saves."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", str(EXAMPLE), "--folder"]
    done = subprocess.run(
        [*command, str(folder), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step-50.pt", "step-60.pt"]  # and nothing that the killed have left
    return done.stdout, torch.load(folder / "step-60.pt", weights_only=True)["state"]


@pytest.mark.slow
def test_killed_ranks(tmp_path: Path) -> None:
    """First rank 1, in the middle of step 13, then rank 0, which writes the checkpoints."""
    said, whole = torchrun(tmp_path / "whole")
    assert "attempt" not in said
    said, killed = torchrun(tmp_path / "killed", "--fail", "1:13", "0:37")
    # Two processes write at once: their lines may share one.
    goes_on = sorted(re.findall(r"attempt \d: rank \d goes on at step \d+", said))
    assert goes_on == [
        f"attempt {attempt}: rank {rank} goes on at step {step}"
        for attempt, step in ((1, 10), (2, 30))
        for rank in (0, 1)
    ]
    torch.testing.assert_close(killed["model"], whole["model"], rtol=0, atol=0)
    states = killed["optimizer"]["state"], whole["optimizer"]["state"]
    kept = {name.partition("@")[0] for entries in states[1].values() for name in entries}
    assert kept == {"made_with", "momentum_buffer", "r"}
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert killed["losses"] == whole["losses"]
