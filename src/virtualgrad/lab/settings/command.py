"""The command `virtualgrad suggest`: how far from tuned settings do suggested ones land?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from virtualgrad.lab.console import errors_told, say
from virtualgrad.lab.devices import choose_fast_kernels, runs_at_once, setup_named
from virtualgrad.lab.options import (
    Amp,
    AtOnce,
    Compile,
    Device,
    FirstSeed,
    Markdown,
    Records,
    Resume,
    Stretched,
)
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import load_records, write_safely
from virtualgrad.lab.report.markdown import written
from virtualgrad.lab.report.readme import update_readme
from virtualgrad.lab.report.terminal import print_contents
from virtualgrad.lab.settings.compare import Comparison, compare
from virtualgrad.lab.settings.files import best_of_sweep, load_kept
from virtualgrad.lab.settings.table import contents_of
from virtualgrad.lab.settings.ways import WAYS
from virtualgrad.lab.sweep.plan import recipe_named
from virtualgrad.lab.sweep.spaces import shortened

__all__ = ["suggest"]

PLACE = "suggestions"  # in a Markdown file
TABLES = "tables.md"


def suggest(
    which: Annotated[
        str, typer.Argument(metavar="|".join(RECIPES), help="The recipe; none with --table.")
    ] = "",
    *,
    ways: Annotated[
        str,
        typer.Option(
            help=f"Which to train: {', '.join(WAYS)}, separated by commas; all by default."
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Runs with each of the settings.")] = 5,
    first_seed: FirstSeed = 0,
    steps: Stretched = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What `virtualgrad sweep` left: train its best settings of SVGD, too.",
            exists=True,
        ),
    ] = None,
    device: Device = "auto",
    amp: Amp = False,
    compiled: Compile = False,
    at_once: AtOnce = None,
    out: Records = Path("runs/settings"),
    resume: Resume = False,
    table: Annotated[
        bool, typer.Option("--table", help="Train nothing: the table of what --out holds.")
    ] = False,
    page: Markdown = None,
) -> None:
    """Find settings of SVGD from a recipe's SGD, RMSProp and Adam, and train with them.

    By the paper's two rules (SVGD.from_sgd) and by suggest(), which checks them on eight
    batches. Their errors stand beside those of the recipe's own settings and, with --sweep,
    of the best that a sweep found. docs/settings.md says how settings are found.

    Leaves a record of every run, RECIPE-settings.json (what was found, and why) and
    tables.md in the folder --out.

    Example: virtualgrad suggest mlp --sweep runs/sweep-mlp
    """
    console = Console()
    stopped = f"Stopped; what is done is kept in {out}. To go on: the same command with --resume."
    with errors_told(console, stopped):
        if not table:
            recipe = shortened(recipe_named(which), steps)
            setup = setup_named(device, amp=amp, compiled=compiled)
            choose_fast_kernels(setup.device)
            job = Comparison(
                recipe,
                range(first_seed, first_seed + seeds),
                setup,
                out,
                named_ways(ways),
                None if sweep is None else best_of_sweep(sweep, recipe),
                at_once=runs_at_once(at_once, setup.device),
                resume=resume,
            )
            compare(job, console)
        _show(out, page, console)


def named_ways(given: str) -> list[str]:
    """The ways that are asked for, all if none is."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in WAYS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(WAYS)}", param_hint="--ways")
    return names or list(WAYS)


def _show(out: Path, page: Path | None, console: Console) -> None:
    """Print the tables of a folder, and write them."""
    contents = contents_of(load_kept(out), load_records(out))
    print_contents(contents, console)
    text = written(contents)
    write_safely(out / TABLES, text)
    if page is not None:
        update_readme(page, {PLACE: text})
    say(console, f"Records and tables are in {out}.")
