"""Measure one case: all optimizers on one network, in one mode and number format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from virtualgrad.lab.bench.floor import Counts, floor_ratio
from virtualgrad.lab.bench.memory import allocated, peak_beyond, release
from virtualgrad.lab.bench.methods import REFERENCE, Method
from virtualgrad.lab.bench.modes import MODES, Mode, Precision, layers_in
from virtualgrad.lab.bench.networks import Network
from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.bench.timing import Step, Timings, clock_of, interleave, reason
from virtualgrad.lab.bench.turns import Turns
from virtualgrad.lab.bench.work import Work, Workshop
from virtualgrad.lab.optimizers import state_bytes

OnBlock = Callable[[str], object]


@dataclass(frozen=True)
class Case:
    """What is measured together, in turns.

    Attributes:
        network: The network.
        precision: The number format.
        mode: How a step is run.
        methods: The optimizers.
    """

    network: Network
    precision: Precision
    mode: Mode
    methods: tuple[Method, ...]

    @property
    def title(self) -> str:
        """For the display."""
        return f"{self.network.title}, {self.precision.name}, {self.mode.name}"

    def blocks(self, rounds: int) -> int:
        """How often :func:`measure` will tell of a block: making, trying out, and the rounds."""
        return len(self.methods) * (2 + rounds)


@dataclass
class _Made:
    """What the making of the works has brought, by optimizer."""

    steps: dict[str, Step] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)  # a CUDA graph keeps none of its tensors
    timings: Timings = field(default_factory=Timings)


def measure(
    case: Case,
    workshop: Workshop,
    on_block: OnBlock = lambda name: None,
    turns: Turns | None = None,
) -> list[Row]:
    """Warm up every optimizer, look at its memory, and time them all in turns.

    An optimizer that fails gets a row with the error; the others are measured all the same.

    Args:
        case: What to measure.
        workshop: Makes the models with their optimizers.
        on_block: Called before each block with the name of the optimizer.
        turns: With other calls, if there are any.
    """
    setup, made, turns = workshop.setup, _Made(), turns or Turns()
    with turns.choosing():
        _choose_kernels(case, workshop)
    with turns.making(), layers_in(case.mode):
        _make_all(case, workshop, on_block, made)
    with turns.measuring():
        made.timings = interleave(
            made.steps,
            rounds=setup.rounds,
            seconds=setup.block_seconds,
            clock=clock_of(setup.device),
            on_block=on_block,
        )
    made.errors |= made.timings.errors
    counts = Counts(case.network, case.precision)
    return [_row(case, method, made, counts, setup.bandwidth) for method in case.methods]


def _choose_kernels(case: Case, workshop: Workshop) -> None:
    """Make two eager steps for nothing, where that is still to be done.

    cuDNN chooses its kernels by trial at the first, for this network and format; cuBLAS takes its
    workspace, and keeps it: it would count as memory of the optimizer that happens to come first.
    """
    device = workshop.setup.device
    if device.type == "cuda" and not workshop.has_chosen_kernels:  # pragma: no cover
        work = workshop.make(case.methods[0], MODES["eager"])
        for _ in range(2):
            work.step()
        del work
        release(device)
        workshop.has_chosen_kernels = True


def _make_all(case: Case, workshop: Workshop, on_block: OnBlock, made: _Made) -> None:
    """Make every optimizer with its model; those that fail leave an error."""
    pool = torch.cuda.graph_pool_handle() if case.mode.graphed else None
    for method in case.methods:
        on_block(method.name)
        try:
            _make(method, case, workshop, pool, made)
        except Exception as error:
            made.errors[method.name] = reason(error)
        if method.name in made.errors:  # only now are its frames gone, and its tensors with them
            release(workshop.setup.device)


def _make(method: Method, case: Case, workshop: Workshop, pool: Any, made: _Made) -> None:
    device, graphed = workshop.setup.device, case.mode.graphed
    before = allocated(device) if case.mode.name == "eager" else None
    work = workshop.make(method, case.mode)
    for _ in range(workshop.setup.warm_up):
        work.step()
    peak = peak_beyond(before, work.step, device)
    step = work.captured(pool, torch.cuda.current_stream(device)) if graphed else work.step
    made.state[method.name] = state_bytes(work.optimizer)
    made.peaks[method.name] = peak
    made.works.append(work)
    made.steps[method.name] = step


def _row(case: Case, method: Method, made: _Made, counts: Counts, bandwidth: float) -> Row:
    name, timings = method.name, made.timings
    time, ratio = timings.time(name), timings.ratio(name, REFERENCE)
    sgd = timings.time(REFERENCE)
    state, peak = made.state.get(name), made.peaks.get(name)
    extra = counts.extra_bytes(method, state)
    return Row(
        model=case.network.name,
        mode=case.mode.name,
        dtype=case.precision.name,
        optimizer=name,
        batch_size=case.network.batch_size,
        parameters=counts.parameters,
        ms=None if time is None else 1e3 * time.value,
        ms_spread=None if time is None else 1e3 * time.spread,
        ratio_to_sgd=None if ratio is None else ratio.value,
        ratio_spread=None if ratio is None else ratio.spread,
        ratio_quartiles=None if ratio is None else (ratio.lower, ratio.upper),
        peak_bytes=peak,
        peak_ratio_to_sgd=_quotient(peak, made.peaks.get(REFERENCE)),
        state_bytes=state,
        state_per_parameter=_quotient(state, counts.parameters),
        extra_bytes=extra,
        floor_ratio=None
        if extra is None or sgd is None
        else floor_ratio(extra, bandwidth=bandwidth, sgd_seconds=sgd.value),
        flops=counts.flops,
        steps_per_block=None if time is None else timings.steps[name],
        error=made.errors.get(name),
    )


def _quotient(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
