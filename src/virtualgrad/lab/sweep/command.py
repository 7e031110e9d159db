"""The command `virtualgrad sweep`: search the settings of optimizers, and say how much they matter.

Optuna, the database and the plots are imported when the command runs: the other commands do not
need them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from virtualgrad.lab.console import errors_told, say
from virtualgrad.lab.devices import setup_named
from virtualgrad.lab.options import Amp, Device, Markdown, Stretched, existing_folder
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.report.markdown import DIGITS_WARNING, written
from virtualgrad.lab.report.readme import update_readme
from virtualgrad.lab.report.terminal import print_contents
from virtualgrad.lab.reproduce import load_data
from virtualgrad.lab.sweep.comparison import PLACE, compared, load_summaries
from virtualgrad.lab.sweep.plan import Sweep, optimizers_named, recipe_named
from virtualgrad.lab.sweep.results import Result, content_of
from virtualgrad.lab.sweep.search import SweepError
from virtualgrad.lab.sweep.spaces import SPACES, shortened

__all__ = ["sweep"]

DATABASE = "sweep.db"
MOST_WORKERS = 8  # by default; each keeps the data in memory


def sweep(
    which: Annotated[
        str,
        typer.Argument(
            metavar="|".join(RECIPES), help="The recipe whose network to train; none with --table."
        ),
    ] = "",
    *,
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"Whose settings: {', '.join(SPACES)}, several separated by commas, or all."
        ),
    ] = "svgd",
    trials: Annotated[
        int, typer.Option(min=1, help="Finished trials of each optimizer, pruned ones included.")
    ] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each trial, side by side.")] = 3,
    steps: Stretched = None,
    storage: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="postgresql://USER:PASSWORD@HOST/DATABASE: the same command on several machines "
            "shares the work. By default an SQLite file in --out.",
        ),
    ] = "",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Trials at once; by default 1 on a GPU, one per core on a CPU."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; by default runs/sweep-RECIPE.", file_okay=False),
    ] = None,
    name: Annotated[
        str, typer.Option(help="Of the study, where one database holds several of a recipe.")
    ] = "",
    device: Device = "auto",
    amp: Amp = False,
    table: Annotated[
        Path | None,
        existing_folder("Search nothing: one table of the sweeps whose folders lie in this one."),
    ] = None,
    page: Markdown = None,
) -> None:
    """Search learning rate (and, for SVGD, scale) of optimizers, each with as many trials.

    Leaves sweep.html (one page that needs no network), summary.json, tables.md,
    recipe.py (the best settings, to paste) and the plots in the folder --out. Ctrl-C
    stops it; the same command goes on, and so it does after a crash. docs/sweeps.md
    says more.

    Example: virtualgrad sweep mlp --optimizer all --trials 50 --steps 2000
    """
    console = Console()
    if table is not None:
        with errors_told(console, "Stopped."):
            _show_table(table, page, console)
        return
    recipe = shortened(recipe_named(which), steps)
    optimizers, left_out = optimizers_named(optimizer, recipe)
    setup = setup_named(device, amp=amp)
    out = out or Path("runs") / f"sweep-{recipe.name}"
    on_gpu = setup.device.type == "cuda"
    many = workers or (1 if on_gpu else min(MOST_WORKERS, os.cpu_count() or 1))
    for sentence in left_out:
        say(console, sentence)
    with errors_told(console, "Stopped; finished trials are kept. To go on: the same command."):
        data = load_data(recipe.data, console).name
        plan = Sweep(recipe, optimizers, trials, seeds, setup, data, name or recipe.name)
        _run(plan, storage or f"sqlite:///{out / DATABASE}", many, out, console)


def _show_table(folder: Path, page: Path | None, console: Console) -> None:
    """Print the sweeps of a folder side by side, and put the table into a Markdown file."""
    content = compared(load_summaries(folder))
    print_contents([content], console)
    if page is not None:
        update_readme(page, {PLACE: written([content])})


def _run(plan: Sweep, url: str, workers: int, out: Path, console: Console) -> None:
    """Search, then print and write what was found."""
    try:
        from virtualgrad.lab.sweep.pool import run_searches  # noqa: PLC0415
        from virtualgrad.lab.sweep.storage import Store  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SweepError.of(
            given=f"a sweep without the package {error.name!r}",
            allowed="Python with the extra 'sweep' of virtualgrad",
            todo='pip install "virtualgrad[sweep]"',
        ) from error
    from virtualgrad.lab.sweep.write import write_results  # noqa: PLC0415

    found = run_searches(plan.searches(), Store(url), workers, console)
    # A study may have more, from a call with more trials: the same number for all is fair.
    results = [
        Result(plan.recipe, optimizer, tuple(trials[: plan.trials]))
        for optimizer, trials in zip(plan.optimizers, found, strict=True)
    ]
    print_contents([content_of(results)], console)
    warning = DIGITS_WARNING if "digits" in plan.data.lower() else None
    path = write_results(results, out, plan.identity, warning)
    say(console, f"\nThe page: {path}. The settings, to paste: {out / 'recipe.py'}")
