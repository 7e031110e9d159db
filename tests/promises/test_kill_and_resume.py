"""Promise 6: killed with SIGKILL at any moment, a run goes on to the same end, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import resumable
import torch

KILLS = 25  # of each reading


@pytest.mark.slow
def test_fifty_kills_change_no_bit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", resumable.__file__, tmp_path, str(KILLS)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # a process that forks has one thread
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert left.keys() == resumable.READINGS.keys()
    for reading, steps in left.items():
        assert len(steps) == KILLS
        assert len(set(steps)) > 5, steps  # all along the run
        whole, killed = (torch.load(tmp_path / reading / f"{at}.pt") for at in ("whole", "killed"))
        states = whole["optimizer"].pop("state"), killed["optimizer"].pop("state")
        kept = {name.partition("@")[0] for entries in states[0].values() for name in entries}
        assert kept == {"made_with", "momentum_buffer", "r"}
        torch.testing.assert_close(*states, rtol=0, atol=0)
        torch.testing.assert_close(whole.pop("model"), killed.pop("model"), rtol=0, atol=0)
        assert whole == killed  # the rest are plain numbers
