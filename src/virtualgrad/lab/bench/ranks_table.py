"""The rows of the benchmark over several ranks: kept in a file, and shown as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from virtualgrad.lab.bench.methods import REFERENCE
from virtualgrad.lab.bench.rows import ENVIRONMENT, load_environment, readable
from virtualgrad.lab.bench.titles import NONE, network_title, three_digits
from virtualgrad.lab.record import environment, write_safely
from virtualgrad.lab.report.readme import update_readme

RANKS = "ranks.json"
PLACE = "ranks"
"""Name of the place for it in a README."""

TITLES = {
    REFERENCE: "SGD",
    "released": "SVGD, r of before",
    "released-alone": "– not shared",
    "updated-first": "SVGD, r updated first",
    "updated-first-alone": "– not shared",
}
COLUMNS = ("ranks", "optimizer", "ms", "× SGD", "reduction", "reductions", "KiB")


@dataclass(frozen=True)
class RankRow:
    """One optimizer on one network, on some number of ranks.

    Attributes:
        model: Name of the network.
        ranks: Number of processes.
        optimizer: Name of the optimizer; ``-alone`` ends that of one with process_group=None.
        batch_size: Samples of each rank.
        parameters: How many numbers the parameters hold.
        ms: Milliseconds per step: the median over the rounds.
        ms_spread: Its interquartile range.
        ratio_to_sgd: The median over the rounds of the time over SGD's in the same round.
        ratio_spread: Its interquartile range.
        reduction_ratio: Likewise over the time without the reduction of statistics.
        reduction_spread: Its interquartile range.
        reductions: How often a step reduces something over all ranks, DDP's gradients counted.
        reduced_bytes: How much a rank sends into them.
        steps_per_block: Steps in a timed block.
    """

    model: str
    ranks: int
    optimizer: str
    batch_size: int
    parameters: int
    ms: float
    ms_spread: float
    ratio_to_sgd: float
    ratio_spread: float
    reduction_ratio: float | None
    reduction_spread: float | None
    reductions: int
    reduced_bytes: int
    steps_per_block: int


def save_ranks(rows: Sequence[RankRow], folder: Path, settings: dict[str, Any]) -> None:
    """Write the rows, in place of older ones, with hardware, versions and settings."""
    found = environment(torch.device("cpu"))
    found |= {"threads": 1, "cores": os.cpu_count(), "settings": settings}
    write_safely(folder / ENVIRONMENT, json.dumps(found, indent=1) + "\n")
    write_safely(folder / RANKS, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def load_ranks(folder: Path) -> list[RankRow]:
    """The rows of a folder; a file that holds none is named in the error."""
    with readable(folder / RANKS) as path:
        return [RankRow(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def show_ranks(folder: Path, readme: Path | None, console: Console) -> None:
    """Print the rows of a folder, and put them into a README."""
    rows = load_ranks(folder)
    print_ranks(rows, console)
    if readme is not None:
        update_readme(readme, {PLACE: ranks_markdown(rows, load_environment(folder))})


def ranks_markdown(rows: Sequence[RankRow], environment: dict[str, Any]) -> str:
    """A table per network, and how it was measured."""
    blocks = [_provenance(rows, environment)]
    rule = ["---:", "---", *(["---:"] * (len(COLUMNS) - 2))]
    for title, cells in _tables(rows):
        lines = [COLUMNS, rule, *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        blocks.append(f"{title}:\n\n{table}")
    return "\n\n".join(blocks) + "\n"


def print_ranks(rows: Sequence[RankRow], console: Console) -> None:
    """The same on the terminal."""
    for title, cells in _tables(rows):
        table = Table(box=None, padding=(0, 1, 0, 0), title=Text(title), title_justify="left")
        for number, column in enumerate(COLUMNS):
            table.add_column(column, justify="left" if number == 1 else "right", no_wrap=True)
        for line in cells:
            table.add_row(*line)
        console.print(table)
        console.print()


def summary(rows: Sequence[RankRow]) -> str:
    """One sentence on what was measured of a network on some number of ranks."""
    ratios = [f"{TITLES[r.optimizer]} {r.ratio_to_sgd:.2f}" for r in rows if r.reduction_ratio]
    ranks = f"{rows[0].ranks} rank{'s' if rows[0].ranks > 1 else ''}"
    return f"{network_title(rows[0].model)}, {ranks}: x SGD: {', '.join(ratios)}"


def crowded(ranks: int, cores: int | None) -> bool:
    """Whether so many ranks have to share cores."""
    return cores is not None and ranks > cores


def _provenance(rows: Sequence[RankRow], environment: dict[str, Any]) -> str:
    cores, commit = environment.get("cores"), environment.get("commit")
    spread = median(row.ratio_spread for row in rows)
    parts = [
        f"{environment.get('device')}, {cores} cores, one thread per rank, gloo, torch "
        f"{environment.get('torch')}",
        str(environment.get("date"))[:10] + (f", commit {commit[:7]}" if commit else ""),
        f"{environment.get('settings', {}).get('rounds')} rounds; half of the ratios to SGD spread "
        f"(IQR) by less than {spread:.2f}",
    ]
    text = "; ".join(parts) + "."
    many = sorted({row.ranks for row in rows if crowded(row.ranks, cores)})
    if many:
        named = " and ".join(map(str, many))
        text += (
            f" {named} ranks share {cores} cores: every wait for another rank is then a wait for "
            "the scheduler, so take those rows for an upper bound."
        )
    return text


def _tables(rows: Sequence[RankRow]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Per network its title, and a line of cells for every optimizer on every number of ranks."""
    tables = []
    for model, group in groupby(rows, lambda row: row.model):
        own = list(group)
        first = own[0]
        title = f"{network_title(model)}, {first.parameters:,} parameters, batch "
        tables.append((f"{title}{first.batch_size} per rank", [_cells(row, own) for row in own]))
    return tables


def _cells(row: RankRow, rows: Sequence[RankRow]) -> tuple[str, ...]:
    """Reductions and bytes are those beyond DDP's own, which SGD shows."""
    sgd = next(r for r in rows if r.ranks == row.ranks and r.optimizer == REFERENCE)
    is_sgd = row is sgd
    beyond = "" if is_sgd else "+"
    kib = (row.reduced_bytes - (0 if is_sgd else sgd.reduced_bytes)) / 1024
    return (
        str(row.ranks) if is_sgd else "",
        TITLES.get(row.optimizer, row.optimizer),
        three_digits(row.ms),
        f"{row.ratio_to_sgd:.2f} ± {row.ratio_spread:.2f}" if not is_sgd else "1",
        NONE
        if row.reduction_ratio is None
        else f"{row.reduction_ratio:.2f} ± {row.reduction_spread:.2f}",
        f"{beyond}{row.reductions - (0 if is_sgd else sgd.reductions)}",
        f"{beyond}{kib:,.1f}",
    )
