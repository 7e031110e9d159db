"""The tables on the terminal, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from virtualgrad.lab.record import Record
from virtualgrad.lab.report.content import Content, content_of
from virtualgrad.lab.report.markdown import DIGITS_WARNING
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.tables import Entry, Table
from virtualgrad.lab.report.verdict import Finding

STYLES = {True: "green", False: "yellow", None: ""}


def print_table(records: Sequence[Record], console: Console | None = None) -> None:
    """Print each recipe's table and what it shows.

    Args:
        records: Records of runs, finished or not.
        console: Where to print; standard output if None.

    Raises:
        RecordError: No run has finished, or finished runs cannot be reported together.
    """
    console = console or Console()
    sections = gather(records)
    print_contents([content_of(section) for section in sections], console)
    if any(section.on_digits for section in sections):
        console.print(Text(DIGITS_WARNING, style="bold red"))


def print_contents(contents: Iterable[Content], console: Console) -> None:
    """Print tables and what they show."""
    for content in contents:
        console.print()
        console.print(_rich(content.table))
        console.print()
        for finding in content.findings:
            console.print(_sentence(finding))
        for line in content.open_runs:
            console.print(Text(line, style="yellow"))


def _rich(table: Table) -> RichTable:
    rich = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    rich.add_column("", overflow="fold")
    for number, column in enumerate(table.columns):
        widest = max(len(str(row.entries[number])) for row in table.rows)
        heading = "\n".join(wrap(column, widest, break_long_words=False))
        rich.add_column(Text(heading), justify="right", vertical="bottom", no_wrap=True)
    for row in table.rows:
        rich.add_row(Text(row.label), *map(_entry, row.entries))
    return rich


def _entry(entry: Entry) -> Text:
    return Text(str(entry), style="bold green" if entry.best else "")


def _sentence(finding: Finding) -> Text:
    mark = {True: "✓ ", False: "✗ ", None: "· "}[finding.holds]
    return Text(mark + finding.text, style=STYLES[finding.holds])
