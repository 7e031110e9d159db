"""Every Python block of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from virtualgrad.errors import GraphvizError
from virtualgrad.lab.networks import MLP

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pictures go there
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(8, 784), torch.randint(0, 10, (8,))
    names = {"F": F, "model": model, "x": x, "loader": [(x, y)] * 2}
    names["loss"] = F.cross_entropy(model(x), y)
    try:
        exec(compile(block, "README.md", "exec"), names)
    except GraphvizError:  # the last line of its block, where Graphviz is not installed
        assert "graph.svg" in block
