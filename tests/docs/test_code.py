"""Every Python block of the README and of the site runs as it stands, and prints what it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pages import PAGES, README, ROOT, Block, blocks_of

from virtualgrad import native
from virtualgrad.errors import GraphvizError
from virtualgrad.lab.cli import COMMANDS, command_named
from virtualgrad.lab.networks import MLP

COMMAND = re.compile(r"^ *virtualgrad (.+)$", re.MULTILINE)
WITH_CODE = [path for path in PAGES if blocks_of(path)]


@pytest.fixture(autouse=True)
def nodes_of_python() -> Iterator[None]:
    """Pages show the names of those; a reader may have built others (virtualgrad.native)."""
    native.use(False)
    yield
    native.use(True)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader has before the first block: a model and data."""
    monkeypatch.chdir(tmp_path)  # pictures go there
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(8, 784), torch.randint(0, 10, (8,))
    loss = F.cross_entropy(model(x), y)
    return {"F": F, "model": model, "x": x, "y": y, "loader": [(x, y)] * 2, "loss": loss}


def run(block: Block, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a block, its line numbers being those of its page."""
    code = "\n" * (block.line - 1) + block.code
    capsys.readouterr()
    try:
        exec(compile(code, ROOT / block.page, "exec"), names)
    except GraphvizError:  # the last line of its block, where Graphviz is not installed
        assert "graph.svg" in block.code
    if block.output is not None:
        assert capsys.readouterr().out == block.output


def test_there_are_blocks() -> None:
    assert len(blocks_of(README)) >= 3
    assert len(WITH_CODE) >= 6


@pytest.mark.parametrize("block", blocks_of(README), ids=str)
def test_a_block_of_the_readme_runs_alone(
    block: Block, names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(block, names, capsys)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks_of(page):
        run(block, names, capsys)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The repository after `make reproduce` and `virtualgrad bench`: the folders they made."""
    made = re.findall(r"reproduce .*--out (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    folders = [Path(folder) for folder in (*made, "runs/bench")]
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        folder.mkdir(parents=True)
    for name in ("docs", "results", "README.md"):
        Path(name).symlink_to(ROOT / name)
    return folders


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_commands_can_be_copied(page: Path, written: list[Path]) -> None:
    """Each line that begins with the command is one call, with arguments that it takes."""
    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        name, *arguments = shlex.split(line, comments=True)
        assert name in COMMANDS, f"{page.name}: virtualgrad {line}"
        given = command_named(name).make_context(name, arguments).params
        if name == "report":
            assert given["folder"] in written or any(given["folder"].glob("*-seed0.json"))
