"""The command `virtualgrad reproduce`: train by the paper's recipes, beside its tables."""

from __future__ import annotations

from dataclasses import replace
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
    Records,
    Resume,
)
from virtualgrad.lab.readings import with_readings
from virtualgrad.lab.recipes import RECIPES, Recipe
from virtualgrad.lab.report import print_table
from virtualgrad.lab.reproduce import Job, make_runs

__all__ = ["reproduce"]


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
    first_seed: FirstSeed = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Fewer steps than the paper, to try things out.")
    ] = None,
    device: Device = "auto",
    amp: Amp = False,
    compiled: Compile = False,
    at_once: AtOnce = None,
    out: Records = Path("runs"),
    resume: Resume = False,
) -> None:
    """Train the paper's networks by its recipes, and compare with its tables.

    Each run leaves a record (JSON) in the folder --out; `virtualgrad report` makes a page of them.
    """
    setup, console = setup_named(device, amp=amp, compiled=compiled), Console()
    choose_fast_kernels(setup.device)
    stopped = f"Stopped; what is done is kept in {out}. To go on: the same command with --resume."
    with errors_told(console, stopped):
        jobs = [
            Job(
                recipe if steps is None else replace(recipe, steps=steps),
                _columns(recipe, optimizers),
                range(first_seed, first_seed + seeds),
                setup,
                out,
                at_once=runs_at_once(at_once, setup.device),
                resume=resume,
            )
            for recipe in _recipes(which, readings)
        ]
        print_table([record for job in jobs for record in make_runs(job, console)], console)
    say(console, f"\nRecords are in {out}. For a page with plots: virtualgrad report {out}")


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
