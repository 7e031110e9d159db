"""Measure all cases, one after the other, and keep the rows as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

from virtualgrad.lab.bench.display import Display
from virtualgrad.lab.bench.measure import Case, measure
from virtualgrad.lab.bench.memory import release, side_stream
from virtualgrad.lab.bench.modes import numbers_in
from virtualgrad.lab.bench.rows import Results, Row
from virtualgrad.lab.bench.timing import reason
from virtualgrad.lab.bench.turns import Turns
from virtualgrad.lab.bench.work import Setup, Workshop
from virtualgrad.lab.record import environment


def environment_of(setup: Setup) -> dict[str, Any]:
    """Hardware, versions, date and settings, for beside the rows."""
    settings = asdict(setup) | {"device": str(setup.device)}
    return environment(setup.device) | {"settings": settings}


def run(cases: Sequence[Case], setup: Setup, results: Results, display: Display) -> list[Row]:
    """Measure all cases and return their rows; those of each case are written at once.

    Args:
        cases: Those of one network and precision stand together, to share compiled models.
        setup: How to measure.
        results: Takes the rows.
        display: Is told what happens.
    """
    made: list[Row] = []
    for _, group in groupby(cases, lambda case: (case.network.name, case.precision.name)):
        together = list(group)
        _forget_compiled(together)
        with numbers_in(together[0].precision), side_stream(setup.device):
            made += _measure_together(together, setup, results, display)
        _forget_compiled(together)
    return made


def _forget_compiled(cases: Sequence[Case]) -> None:
    """Or models of several formats count as recompilations of one, and hold memory."""
    if any(case.mode.compiled for case in cases):
        torch.compiler.reset()


def _measure_together(
    cases: Sequence[Case], setup: Setup, results: Results, display: Display
) -> list[Row]:
    """Measure the cases of one network in one precision."""
    made: list[Row] = []
    workshop: Workshop | None = None
    for case in cases:
        display.begin(case)
        release(setup.device)
        try:
            workshop = workshop or Workshop(case.network, case.precision, setup)
            rows = measure(case, workshop, display.block, Turns(results.folder))
        except Exception as error:  # the inputs alone do not fit, say
            rows = [_failed(case, method.name, reason(error)) for method in case.methods]
        results.add(rows)
        made += rows
        display.end(case, rows)
    return made


def _failed(case: Case, optimizer: str, error: str) -> Row:
    network = case.network
    return Row(
        network.name,
        case.mode.name,
        case.precision.name,
        optimizer,
        network.batch_size,
        0,
        error=error,
    )
