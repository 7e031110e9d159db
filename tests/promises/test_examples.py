"""Every example runs by itself, as a user would run it, and its loss falls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
ON_SEVERAL_PROCESSES = {"ddp.py", "elastic.py", "fsdp.py"}
WITHOUT_TRAINING = {"explain_a_model.py", "architectures.py"}

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",  # nothing may be downloaded
    # Some machines announce bfloat16 instructions that they cannot run.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
}


def test_the_list_is_complete() -> None:
    assert set(SCRIPTS) >= WITHOUT_TRAINING | {
        "custom_operator.py",
        "ddp.py",
        "elastic.py",
        "fsdp.py",
        "hf_accelerate.py",
        "hf_trainer.py",
        "lightning_module.py",
        "mixed_precision.py",
        "raw_parameters.py",
        "ten_lines.py",
    }


# architectures.py writes into the repository; test_architectures.py checks what it writes.
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "architectures.py"])
def test_example(script: str, tmp_path: Path) -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *(start if script in ON_SEVERAL_PROCESSES else ()), EXAMPLES / script],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if script in WITHOUT_TRAINING:
        assert "T acts at 8 of 8 sigmas" in done.stdout
        return
    found = re.search(r"^loss ([\d.]+) -> ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert found is not None, done.stdout
    first, last = map(float, found.groups())
    assert last < 0.9 * first
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
