"""The command `virtualgrad report`: tables, plots and a page from the records of runs."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from virtualgrad.lab.record import RecordError, load_records
from virtualgrad.lab.report.readme import update_readme
from virtualgrad.lab.report.terminal import print_table
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
    readme: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A Markdown file to put the tables into, where two comments mark the place.",
            dir_okay=False,
            exists=True,
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
    try:
        page = write_report(folder, out)
        if readme is not None:
            update_readme(readme, page.with_name("tables.md"))
        print_table(load_records(folder))
    except RecordError as error:
        Console(stderr=True).print(
            str(error), style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from error
    Console().print(f"\nThe page: {page}", markup=False, highlight=False, soft_wrap=True)
