"""`virtualgrad bench --ranks`: the cost of sharing statistics, on two processes and in tables."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from pages import ROOT
from rich.console import Console
from torch import distributed
from typer.testing import CliRunner

from virtualgrad.lab.bench.networks import NETWORKS, tiny
from virtualgrad.lab.bench.ranks import (
    VARIANTS,
    Collectives,
    common_clock,
    measure_here,
    process_group,
)
from virtualgrad.lab.bench.ranks_table import (
    PLACE,
    RANKS,
    RankRow,
    load_ranks,
    print_ranks,
    ranks_markdown,
)
from virtualgrad.lab.bench.rows import load_environment
from virtualgrad.lab.cli import app
from virtualgrad.lab.record import RecordError
from virtualgrad.lab.report.readme import marks

SGD = RankRow("mlp", 2, "sgd", 32, 1000, 10.0, 0.5, 1.0, 0.0, None, None, 1, 4096, 3)
ROWS = [
    SGD,
    replace(SGD, optimizer="released", ms=15.0, ratio_to_sgd=1.5, ratio_spread=0.2,
            reduction_ratio=1.25, reduction_spread=0.1, reductions=2, reduced_bytes=6144),
    replace(SGD, optimizer="released-alone", ms=12.0, ratio_to_sgd=1.2, ratio_spread=0.1),
]  # fmt: skip
ENVIRONMENT = {
    "device": "x86_64",
    "cores": 2,
    "torch": "2.13.0",
    "date": "2026-11-15T10:00:00+00:00",
    "commit": "0123456789",
    "settings": {"rounds": 7},
}


def run(*arguments):
    return CliRunner().invoke(
        app,
        ["bench", *(str(argument) for argument in arguments)],
        env={"COLUMNS": "200", "TERM": "dumb"},
    )


@pytest.fixture
def alone(tmp_path):
    with process_group(0, 1, tmp_path / "meeting"):
        yield


@pytest.mark.slow
def test_two_processes_and_their_table(tmp_path):
    out, page = tmp_path / "out", tmp_path / "page.md"
    begin, end = marks(PLACE)
    page.write_text(f"a\n{begin}\n{end}\nb\n")
    result = run("--ranks", "2", "--models", "mlp", "--tiny", "--repeats", 1, "--seconds", 0.001,
                 "--out", out, "--readme", page)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "MLP, tiny, 2 ranks: x SGD" in result.output
    rows = {row.optimizer: row for row in load_ranks(out)}
    assert list(rows) == list(VARIANTS)
    assert all(row.ranks == 2 and row.ms > 0 for row in rows.values())
    sgd, layers = rows["sgd"], 5
    assert (sgd.reductions, sgd.reduced_bytes) == (1, 4 * sgd.parameters)  # DDP's one bucket
    # r of before: one buffer, 490 numbers of r and two digits for each of 2 x 5 counts and a flag.
    assert rows["released"].reductions == 2
    assert rows["released"].reduced_bytes - sgd.reduced_bytes == 4 * (490 + 2 * (2 * layers + 1))
    # r updated first: a buffer for each layer, with its two counts.
    assert rows["updated-first"].reductions == 1 + layers
    assert rows["updated-first"].reduced_bytes - sgd.reduced_bytes == 4 * (490 + 2 * layers)
    for name in ("released", "updated-first"):
        assert rows[name].reduction_ratio is not None
        assert rows[f"{name}-alone"].reductions == 1
    environment = load_environment(out)
    assert {"device", "cores", "torch", "commit", "date"} <= set(environment)
    assert ranks_markdown(list(rows.values()), environment).strip() in page.read_text("utf-8")


def test_one_process_reduces_nothing_of_its_own(alone):
    rows = measure_here(tiny(NETWORKS["mlp"]), rounds=1, seconds=0.001)
    assert {row.ranks for row in rows} == {1}
    assert {row.reductions for row in rows} == {1}  # DDP's


def test_collectives_are_counted(alone):
    with Collectives() as counted:
        distributed.all_reduce(torch.zeros(3, dtype=torch.float64))
        torch.zeros(5).add(1)
    assert (counted.calls, counted.bytes) == (1, 24)
    distributed.all_reduce(torch.zeros(3))
    assert counted.calls == 1


def test_the_clock_goes_on(alone):
    assert 0 < common_clock() < common_clock()


def test_markdown():
    text = ranks_markdown(ROWS, ENVIRONMENT)
    assert "x86_64, 2 cores, one thread per rank, gloo, torch 2.13.0; 2026-11-15" in text
    assert "MLP, 1,000 parameters, batch 32 per rank:" in text
    assert "| 2 | SGD | 10.0 | 1 | – | 1 | 4.0 |" in text
    assert "|  | SVGD, r of before | 15.0 | 1.50 ± 0.20 | 1.25 ± 0.10 | +1 | +2.0 |" in text
    assert "|  | – not shared | 12.0 | 1.20 ± 0.10 | – | +0 | +0.0 |" in text
    assert "upper bound" not in text


def test_ranks_that_share_cores_are_named():
    rows = [replace(row, ranks=4) for row in ROWS]
    assert "4 ranks share 2 cores" in ranks_markdown(rows, ENVIRONMENT)


def test_terminal(tmp_path):
    with (tmp_path / "text").open("w", encoding="utf-8") as file:
        print_ranks(ROWS, Console(file=file, width=100))
    lines = (tmp_path / "text").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if "r of before" in line)
    assert line.split() == [
        "SVGD,", "r", "of", "before", "15.0", "1.50", "±", "0.20", "1.25", "±", "0.10",
        "+1", "+2.0",
    ]  # fmt: skip


def test_a_damaged_file_is_named(tmp_path):
    rows = [asdict(row) | {"speed": 1} for row in ROWS]
    (tmp_path / RANKS).write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(RecordError, match=r"ranks\.json, which cannot be read"):
        load_ranks(tmp_path)


@pytest.mark.parametrize("given", ["0", "two", "1,,2"])
def test_refusals(given, tmp_path):
    result = run("--ranks", given, "--out", tmp_path)
    assert result.exit_code == 2 and "is no number of processes" in result.output
    assert not list(tmp_path.iterdir())


def test_the_page_shows_the_records():
    folder = ROOT / "results/ranks"
    table = ranks_markdown(load_ranks(folder), load_environment(folder))
    begin, end = marks(PLACE)
    page = Path(ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert f"{begin}\n\n{table.strip()}\n\n{end}" in page
