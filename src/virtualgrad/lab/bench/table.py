"""All rows as one table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.bench.titles import (
    NONE,
    by_case,
    method_title,
    network_title,
    ratio,
    three_digits,
)
from virtualgrad.lab.report.bars import byte_count

COLUMNS = {
    "optimizer": 15,
    "ms": 7,
    "± ms": 7,
    "× SGD": 6,
    "±": 5,
    "floor": 6,
    "peak": 5,
    "state": 8,
    "B/param": 7,
}
"""Title -> width, so that the parts of the table stand below each other on 80 columns."""


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print the table, a part for each case, and below it what failed and why."""
    console.print(Text("One training step (± interquartile range; peak: memory × SGD's)"))
    for number, case in enumerate(by_case(rows)):
        part = Table(box=None, padding=(0, 1, 0, 0), show_header=number == 0)
        part.title = Text(_case_title(case[0]), style="bold")
        part.title_justify = "left"
        for column, (title, width) in enumerate(COLUMNS.items()):
            part.add_column(title, justify="right" if column else "left", width=width, no_wrap=True)
        for row in case:
            part.add_row(*_cells(row))
        console.print(part)
        console.print()
    for sentence in failures(rows):
        console.print(Text(sentence, style="yellow"), soft_wrap=True)


def failures(rows: Sequence[Row]) -> list[str]:
    """What failed, and why: a sentence for each case and error."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error:
            found.setdefault((_case_title(row), row.error), []).append(row.optimizer)
    return [
        f"{case}, {', '.join(map(method_title, optimizers))}: {error}"
        for (case, error), optimizers in found.items()
    ]


def _case_title(row: Row) -> str:
    return f"{network_title(row.model)}, batch {row.batch_size}, {row.dtype}, {row.mode}"


def _cells(row: Row) -> list[Text]:
    texts = [
        method_title(row.optimizer),
        "failed" if row.error else three_digits(row.ms),
        three_digits(row.ms_spread),
        ratio(row.ratio_to_sgd),
        ratio(row.ratio_spread),
        ratio(row.floor_ratio),
        ratio(row.peak_ratio_to_sgd),
        NONE if row.state_bytes is None else byte_count(row.state_bytes),
        three_digits(row.state_per_parameter),
    ]
    style = "yellow" if row.error else ""
    return [Text(text, style=style) for text in texts]
