"""The command `virtualgrad report`: tables, plots and a page from the records of runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from virtualgrad.lab.console import errors_told, say
from virtualgrad.lab.options import Markdown
from virtualgrad.lab.record import load_records, write_safely
from virtualgrad.lab.report.markdown import readme_blocks, written
from virtualgrad.lab.report.precision import precision_contents
from virtualgrad.lab.report.readme import update_readme
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.terminal import print_contents, print_table
from virtualgrad.lab.report.write import write_report

__all__ = ["report"]


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The folder with the records that `virtualgrad reproduce` left, "
            "such as mlp-svgd-seed0.json.",
            file_okay=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to write; without it, beside the records.", file_okay=False
        ),
    ] = None,
    readme: Markdown = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder with the same runs in another number format (--amp): only compare the "
            "two, in precision.md.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Make tables, plots and one page from the records of runs, beside the paper's numbers.

    Writes report.html (one page that needs no network: open it in a browser), tables.md (the
    tables in Markdown), summary.json (the errors of every seed, for programs) and each plot as PNG
    and SVG. Only finished runs count; the page lists the others. Runs of one optimizer are averaged
    over seeds, and refused if their settings differ.

    Example: virtualgrad reproduce mlp --seeds 5 --out runs, then virtualgrad report runs
    """
    console = Console()
    with errors_told(console, "Stopped; the records are as they were."):
        if beside is None:
            made = _report(folder, out, readme)
        else:
            made = _compare(folder, beside, out, readme)
    say(console, f"\nWritten: {made}")


def _report(folder: Path, out: Path | None, readme: Path | None) -> Path:
    """Tables, plots and the page."""
    page = write_report(folder, out)
    records = load_records(folder)
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        update_readme(readme, readme_blocks(gather(records), text))
    print_table(records)
    return page


def _compare(folder: Path, beside: Path, out: Path | None, readme: Path | None) -> Path:
    """One table: the number formats of two folders."""
    contents = precision_contents(load_records(folder), load_records(beside))
    path, text = (out or folder) / "precision.md", written(contents)
    write_safely(path, text)
    if readme is not None:
        update_readme(readme, {"precision": text})
    print_contents(contents, Console())
    return path
