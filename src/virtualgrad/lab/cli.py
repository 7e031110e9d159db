"""The command line: `virtualgrad reproduce`, `report`, `data`, `lemma`, `theorem`, `paths`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.bench import bench
from virtualgrad.lab.data.command import data
from virtualgrad.lab.figures import lemma, paths, theorem
from virtualgrad.lab.readings import with_readings
from virtualgrad.lab.recipes import RECIPES, Recipe
from virtualgrad.lab.report import print_table, report
from virtualgrad.lab.reproduce import Job, make_runs
from virtualgrad.lab.run import Setup
from virtualgrad.lab.settings import suggest
from virtualgrad.lab.sweep import sweep

app = typer.Typer(
    help="Virtual gradients and SVGD (arXiv 1907.04021): check the paper's claims yourself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (report, data, lemma, theorem, paths, bench, sweep, suggest):
    app.command()(command)

RUNS_AT_ONCE_ON_GPU = 5
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


@app.command()
def reproduce(
    which: Annotated[
        str,
        typer.Argument(
            metavar="|".join([*RECIPES, "all"]), help="The table to reproduce, or all of them."
        ),
    ],
    *,
    optimizers: Annotated[
        str, typer.Option(help="Which columns: names separated by commas; all by default.")
    ] = "",
    readings: Annotated[
        bool,
        typer.Option(
            help="In place of the four optimizers, train the ways to read SVGD that the released "
            "code leaves open, and compare each with the released one."
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each.")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Fewer steps than the paper, to try things out.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    amp: Annotated[bool, typer.Option(help="bfloat16 autocast.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="torch.compile the network: worth it on a GPU.")
    ] = False,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; 5 on a GPU, 1 on a CPU.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records.", file_okay=False)] = Path(
        "runs"
    ),
    resume: Annotated[
        bool, typer.Option(help="Leave out finished runs, and go on with unfinished ones.")
    ] = False,
) -> None:
    """Train the paper's networks by its recipes, and compare with its tables.

    Each run leaves a record (JSON) in the folder --out; `virtualgrad report` makes a page of them.
    """
    setup = _setup(_device(device), amp, compiled)
    on_gpu = setup.device.type == "cuda"
    console = Console()
    try:
        jobs = [
            Job(
                recipe if steps is None else replace(recipe, steps=steps),
                _columns(recipe, optimizers),
                range(first_seed, first_seed + seeds),
                setup,
                out,
                at_once=at_once or (RUNS_AT_ONCE_ON_GPU if on_gpu else 1),
                resume=resume,
            )
            for recipe in _recipes(which, readings)
        ]
        print_table([record for job in jobs for record in make_runs(job, console)], console)
    except (VirtualGradError, OSError) as error:
        Console(stderr=True).print(
            str(error), style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        console.print(
            f"Stopped; what is done is kept in {out}. To go on: the same command with --resume.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED) from error
    console.print(
        f"\nRecords are in {out}. For a page with plots: virtualgrad report {out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _recipes(which: str, readings: bool) -> list[Recipe]:
    if which not in {*RECIPES, "all"}:
        allowed = ", ".join([*RECIPES, "all"])
        raise typer.BadParameter(f"{which!r} is none of {allowed}", param_hint="the table")
    found = list(RECIPES.values()) if which == "all" else [RECIPES[which]]
    return [with_readings(recipe) for recipe in found] if readings else found


def _columns(recipe: Recipe, optimizers: str) -> list[str]:
    names = [name.strip() for name in optimizers.split(",") if name.strip()]
    unknown = [name for name in names if name not in recipe.optimizers]
    if unknown:
        allowed = ", ".join(recipe.optimizers)
        raise typer.BadParameter(f"{unknown[0]!r} is none of {allowed}", param_hint="--optimizers")
    return list(dict.fromkeys(names)) or list(recipe.optimizers)


def _device(name: str) -> torch.device:
    """The device that is asked for, if it is there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdecimal()):
        raise typer.BadParameter(f"{name!r} is none of auto, cpu, cuda", param_hint="--device")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(
            f"{name!r}, but PyTorch finds {torch.cuda.device_count()} CUDA devices here; "
            "use cpu or auto, or install PyTorch for CUDA",
            param_hint="--device",
        )
    return torch.device(name)


def _setup(device: torch.device, amp: bool, compiled: bool) -> Setup:
    on_gpu = device.type == "cuda"
    if on_gpu:  # pragma: no cover - needs a GPU. Kernels may be chosen by trial, and use TF32
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    return Setup(device, amp=amp, channels_last=on_gpu, compiled=compiled)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":  # pragma: no cover - `python -m virtualgrad.lab.cli`
    main()
