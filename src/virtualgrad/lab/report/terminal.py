"""The tables on the terminal, beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from virtualgrad.lab.record import Record
from virtualgrad.lab.report.markdown import DIGITS_WARNING
from virtualgrad.lab.report.sections import Section, gather
from virtualgrad.lab.report.tables import Entry, table_of
from virtualgrad.lab.report.verdict import Finding, verdict

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
    for section in sections:
        console.print()
        console.print(_rich(section))
        for finding in verdict(section):
            console.print(_sentence(finding))
        for line in section.open_runs:
            console.print(Text(line, style="yellow"))
    if any(section.on_digits for section in sections):
        console.print(Text(DIGITS_WARNING, style="bold red"))


def _rich(section: Section) -> RichTable:
    table = table_of(section)
    rich = RichTable(
        title=Text(table.title, style="bold"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    rich.add_column("", overflow="fold")
    for column in table.columns:
        rich.add_column(Text(column), justify="right", no_wrap=True)
    for row in table.rows:
        rich.add_row(Text(row.label), *map(_entry, row.entries))
    return rich


def _entry(entry: Entry) -> Text:
    return Text(str(entry), style="bold green" if entry.best else "")


def _sentence(finding: Finding) -> Text:
    mark = {True: "✓ ", False: "✗ ", None: "· "}[finding.holds]
    return Text(mark + finding.text, style=STYLES[finding.holds])
