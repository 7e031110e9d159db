"""From the names on the command line to the cases to measure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import typer

from virtualgrad.lab.bench.measure import Case
from virtualgrad.lab.bench.methods import METHODS, REFERENCE, Method
from virtualgrad.lab.bench.modes import MODES, PRECISIONS, Mode, Precision
from virtualgrad.lab.bench.networks import NETWORKS, ON_CPU, TINY, Network, tiny
from virtualgrad.lab.bench.peers import COMPARED, PEER_NETWORKS
from virtualgrad.native import built

Thing = TypeVar("Thing")
NOTHING = "none"


def named(given: str, allowed: Mapping[str, Thing], option: str) -> list[Thing]:
    """The things of the given names, separated by commas; all of them if nothing is given."""
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(allowed)}", param_hint=f"--{option}"
            )
    return [allowed[name] for name in names] or list(allowed.values())


def networks_named(given: str, device: torch.device, *, small: bool) -> list[Network]:
    """The networks to measure; by default all on a GPU, and the paper's on a CPU."""
    if given.strip() == NOTHING:
        return []
    if not given.strip() and device.type == "cpu" and not small:
        given = ",".join(ON_CPU)
    chosen = named(given, NETWORKS, "models")
    return [tiny(network) for network in chosen] if small else chosen


def ranks_named(given: str) -> list[int]:
    """Numbers of processes, separated by commas."""
    numbers = [number.strip() for number in given.split(",")]
    for number in numbers:
        if not number.isdecimal() or int(number) < 1:
            raise typer.BadParameter(
                f"{number!r} is no number of processes, such as 1,2,4", param_hint="--ranks"
            )
    return list(dict.fromkeys(map(int, numbers)))


def methods_named(given: str) -> tuple[Method, ...]:
    """The optimizers, and SGD, without which there is nothing to compare with."""
    return tuple(dict.fromkeys((METHODS[REFERENCE], *named(given, METHODS, "optimizers"))))


def modes_on(device: torch.device, given: str) -> tuple[list[Mode], str]:
    """The modes that a device can run, and a sentence about the others."""
    chosen = named(given, MODES, "modes")
    reasons = {mode: reason for mode in chosen if (reason := _why_not(mode, device)) is not None}
    left_out = [f"Left out: {mode.name}. {reason}" for mode, reason in reasons.items()]
    return [mode for mode in chosen if mode not in reasons], " ".join(left_out)


def _why_not(mode: Mode, device: torch.device) -> str | None:
    """Why a device, or this installation, cannot run a mode; None if it can."""
    if mode.graphed and device.type != "cuda":
        return "A CUDA graph needs a CUDA device."
    if mode.native and built() is None:
        return "The layers in C++ are not built: python -m virtualgrad.native."
    return None


def precisions_on(device: torch.device, given: str) -> tuple[list[Precision], str]:
    """The number formats that a device knows, and a sentence if that is not what was asked.

    By default those that people train in; on a CPU, where few do so in bfloat16, fp32.
    """
    if not given.strip():
        given = "tf32,bf16" if device.type == "cuda" else "fp32"
    chosen = named(given, PRECISIONS, "dtypes")
    if device.type == "cuda" or PRECISIONS["tf32"] not in chosen:
        return chosen, ""
    replaced = [PRECISIONS["fp32"] if p.name == "tf32" else p for p in chosen]
    return list(dict.fromkeys(replaced)), "TF32 is a GPU's: fp32 in its place."


def plan(
    networks: Iterable[Network],
    precisions: Sequence[Precision],
    modes: Sequence[Mode],
    methods: tuple[Method, ...],
    *,
    compile_models: str = "",
) -> list[Case]:
    """All cases; those of one network and format together, to share compiled models.

    Args:
        networks: What to train.
        precisions: In which number formats.
        modes: How.
        methods: With which optimizers.
        compile_models: Names of the networks that are compiled where a mode asks for it.
    """
    compiled = {network.name for network in named(compile_models, NETWORKS, "compile-models")}
    return [
        Case(network, precision, mode, _methods_in(mode, methods))
        for network in networks
        for precision in precisions
        for mode in modes
        if not mode.compiled or network.name.removesuffix(TINY) in compiled
    ]


def _methods_in(mode: Mode, methods: tuple[Method, ...]) -> tuple[Method, ...]:
    eager = not (mode.compiled or mode.graphed)
    return tuple(method for method in methods if eager or not method.eager_only)


def peer_cases(precision: Precision, *, small: bool) -> list[Case]:
    """Other libraries beside SGD and SVGD, eagerly."""
    return [
        Case(tiny(network) if small else network, precision, MODES["eager"], COMPARED)
        for network in PEER_NETWORKS.values()
    ]
