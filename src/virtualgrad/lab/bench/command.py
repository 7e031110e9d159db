"""The command `virtualgrad bench`: what a step costs, beside torch's own optimizers."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from virtualgrad.lab.bench.display import Display
from virtualgrad.lab.bench.floor import copy_bandwidth
from virtualgrad.lab.bench.markdown import bench_blocks
from virtualgrad.lab.bench.measure import Case
from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import MODES, PRECISIONS
from virtualgrad.lab.bench.networks import NETWORKS
from virtualgrad.lab.bench.plan import (
    methods_named,
    modes_on,
    networks_named,
    peer_cases,
    plan,
    precisions_on,
    ranks_named,
)
from virtualgrad.lab.bench.plots import draw_ratios, draw_scaling
from virtualgrad.lab.bench.ranks import bench_ranks
from virtualgrad.lab.bench.ranks_table import RANKS, show_ranks
from virtualgrad.lab.bench.rows import SCALING, SUMMARY, Results, load_environment, load_rows
from virtualgrad.lab.bench.run import environment_of, run
from virtualgrad.lab.bench.scaling import scaling_cases
from virtualgrad.lab.bench.table import print_rows
from virtualgrad.lab.bench.turns import Turns
from virtualgrad.lab.bench.work import Setup
from virtualgrad.lab.console import errors_told, say
from virtualgrad.lab.devices import device_named
from virtualgrad.lab.options import Device, Markdown, existing_folder
from virtualgrad.lab.report.readme import update_readme

__all__ = ["bench"]

OUT = Path("runs/bench")


def bench(
    *,
    models: Annotated[
        str,
        typer.Option(
            help=f"Networks: {', '.join(NETWORKS)}, separated by commas, or none. By default all "
            "on a GPU, the paper's three on a CPU."
        ),
    ] = "",
    device: Device = "auto",
    modes: Annotated[str, typer.Option(help=f"How a step runs: {', '.join(MODES)}.")] = ",".join(
        MODES
    ),
    dtypes: Annotated[
        str,
        typer.Option(
            help=f"Number formats: {', '.join(PRECISIONS)}; bf16 is autocast. By default tf32 and "
            "bf16 on a GPU, fp32 on a CPU."
        ),
    ] = "",
    optimizers: Annotated[
        str, typer.Option(help=f"Of {', '.join(METHODS)}; all by default, SGD always.")
    ] = "",
    compile_models: Annotated[
        str, typer.Option(help="Networks to compile, where not all: it takes up to a minute each.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Timed blocks of each optimizer.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.0, help="About how long a block takes.")] = 0.25,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Of the memory, in bytes per second, for the floor (H200: 4.8e12 by its data "
            "sheet); by default that of a copy, measured.",
        ),
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Also along batch, width, image size and depth.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also BackPACK, Opacus and SINGD, where installed.")
    ] = False,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="Measure something else: DDP on so many processes of this CPU, such as 1,2,4, and "
            "what it costs them to share SVGD's statistics.",
        ),
    ] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny networks, to try it out.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = OUT,
    table: Annotated[
        Path | None,
        existing_folder("Measure nothing: show what an earlier call left in this folder."),
    ] = None,
    readme: Markdown = None,
) -> None:
    """Measure time and memory of a training step, SVGD beside torch's own optimizers.

    All optimizers of a case are timed in one process and in turns: blocks of
    steps, round after round. A ratio to SGD is the median over the rounds of
    the ratio of two blocks of the same round, so that drift cancels; spreads
    are interquartile ranges. The floor is the ratio that the bytes SVGD must
    move would allow. docs/performance.md says more.

    Leaves summary.json, environment.json and ratio.png in the folder --out,
    after every case; another call with the same --out adds to them. Calls made
    at once with the same --out compile side by side and measure in turns.

    Example: virtualgrad bench --models mlp,resnet20 --modes eager,graphed
    """
    console = Console()
    with errors_told(console, f"Stopped; every case that was finished is in {out}."):
        if table is None and ranks:
            networks = networks_named(models, torch.device("cpu"), small=tiny)
            sizes = ranks_named(ranks)
            tell = partial(say, console)
            bench_ranks(networks, sizes, out, rounds=repeats, seconds=seconds, tell=tell)
        elif table is None:
            place = device_named(device)
            chosen_modes, about_modes = modes_on(place, modes)
            precisions, about_precisions = precisions_on(place, dtypes)
            networks = networks_named(models, place, small=tiny)
            methods = methods_named(optimizers)
            cases = plan(networks, precisions, chosen_modes, methods, compile_models=compile_models)
            if peers:
                cases += peer_cases(precisions[0], small=tiny)
            along: list[Case] = []
            if scaling:
                mode = MODES["graphed" if place.type == "cuda" else "eager"]
                along = list(scaling_cases(precisions[0], mode, tiny=tiny))
            for sentence in filter(None, (about_modes, about_precisions)):
                say(console, sentence)
            if not cases and not along:
                raise typer.BadParameter(
                    "nothing is left to measure", param_hint="--models, --modes"
                )
            if bandwidth is None:
                with Turns(out).choosing():  # two that copy at once have half of it each
                    bandwidth = copy_bandwidth(place)
            setup = Setup(place, bandwidth, repeats, seconds)
            _measure(cases, along, setup, out, console)
        _show(table or out, readme, console)


def _measure(
    cases: list[Case], along: list[Case], setup: Setup, out: Path, console: Console
) -> None:
    """Measure the cases of the table, and those along each axis."""
    environment = environment_of(setup)
    with Display([*cases, *along], setup.rounds, console) as display, warnings.catch_warnings():
        # What torch.compile and other libraries have to say of models is not our reader's matter.
        warnings.simplefilter("ignore")
        if cases:
            run(cases, setup, Results(out, environment), display)
        if along:
            run(along, setup, Results(out, environment, SCALING), display)


def _show(folder: Path, readme: Path | None, console: Console) -> None:
    """Print the table of a folder, draw its pictures, and put it into a README."""
    files: list[Path] = []
    if (folder / RANKS).exists():
        show_ranks(folder, readme, console)
    if (folder / SUMMARY).exists() or not any((folder / f).exists() for f in (SCALING, RANKS)):
        rows = load_rows(folder)
        console.print()
        print_rows(rows, console)
        files += draw_ratios(rows, folder) or ()
        if readme is not None:
            text = readme.read_text(encoding="utf-8")
            update_readme(readme, bench_blocks(rows, load_environment(folder), text))
    if (folder / SCALING).exists():
        files += draw_scaling(load_rows(folder, SCALING), folder) or ()
    for file in files:
        say(console, f"saved {file}")
    say(console, f"The numbers: {folder}")
