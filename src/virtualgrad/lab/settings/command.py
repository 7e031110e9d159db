"""The command `virtualgrad suggest`: how far from tuned settings do suggested ones land?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.bench.plan import device_named
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import load_records, write_safely
from virtualgrad.lab.report.markdown import written
from virtualgrad.lab.report.readme import update_readme
from virtualgrad.lab.report.terminal import print_contents
from virtualgrad.lab.run import Setup
from virtualgrad.lab.settings.compare import Comparison, compare
from virtualgrad.lab.settings.files import best_of_sweep, load_kept
from virtualgrad.lab.settings.table import contents_of
from virtualgrad.lab.settings.ways import WAYS
from virtualgrad.lab.sweep.plan import recipe_named
from virtualgrad.lab.sweep.spaces import shortened

__all__ = ["suggest"]

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended
AT_ONCE_ON_GPU = 5
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
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of a run; the recipe's schedule is stretched to fit."),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What `virtualgrad sweep` left: train its best settings of SVGD, too.",
            exists=True,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    amp: Annotated[bool, typer.Option("--amp", help="bfloat16 autocast.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile the network: worth it on a GPU.")
    ] = False,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; 5 on a GPU, 1 on a CPU.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records.", file_okay=False)] = Path(
        "runs/settings"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out finished runs, go on with unfinished ones.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Train nothing: the table of what --out holds.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A Markdown file to put the tables into, where two comments mark the place.",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
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
    try:
        if not table:
            recipe = shortened(recipe_named(which), steps)
            place = device_named(device)
            on_gpu = place.type == "cuda"
            if on_gpu:  # pragma: no cover - needs a GPU. As in `reproduce`
                torch.backends.cudnn.benchmark = True
                torch.backends.cuda.matmul.allow_tf32 = True
                torch.backends.cudnn.allow_tf32 = True
            job = Comparison(
                recipe,
                range(first_seed, first_seed + seeds),
                Setup(place, amp=amp, channels_last=on_gpu, compiled=compiled),
                out,
                named_ways(ways),
                None if sweep is None else best_of_sweep(sweep, recipe),
                at_once=at_once or (AT_ONCE_ON_GPU if on_gpu else 1),
                resume=resume,
            )
            compare(job, console)
        _show(out, page, console)
    except (VirtualGradError, OSError) as error:
        Console(stderr=True).print(
            str(error), style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        _say(
            console,
            f"Stopped; what is done is kept in {out}. To go on: the same command with --resume.",
        )
        raise typer.Exit(INTERRUPTED) from error


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
    _say(console, f"Records and tables are in {out}.")


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)
