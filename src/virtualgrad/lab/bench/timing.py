"""Time several kinds of step against each other: blocks of each in turn, round after round.

    round 0:  A A A | B B B | C C C
    round 1:  C C C | B B B | A A A          back again, so that a steady drift favours nobody
    ...

All blocks take about the same time, so a step that is fast is repeated more often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.bench.medians import Median, median_of, median_ratio

Step = Callable[[], object]
Clock = Callable[[], float]

MOST_STEPS = 5000
"""In one block: a clock that stands still must not keep us for ever."""


@dataclass
class Timings:
    """What was measured of each kind of step, by its name.

    Attributes:
        seconds: Seconds per step, one entry per round; nothing of a step that failed.
        steps: Steps in a block.
        errors: Why a kind of step was given up.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def time(self, name: str) -> Median | None:
        """Median seconds per step, if it was measured."""
        return median_of(self.seconds[name]) if name in self.seconds else None

    def ratio(self, name: str, reference: str) -> Median | None:
        """Median ratio to the reference of the same round, if both were measured."""
        if name not in self.seconds or reference not in self.seconds:
            return None
        return median_ratio(self.seconds[name], self.seconds[reference])


def clock_of(device: torch.device) -> Clock:
    """Seconds; on a GPU, after it has done all that was asked of it."""

    def now() -> float:
        if device.type == "cuda":  # pragma: no cover - needs a GPU
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def time_block(step: Step, count: int, clock: Clock) -> float:
    """Seconds that some steps take together."""
    begin = clock()
    for _ in range(count):
        step()
    return clock() - begin


def steps_per_block(step: Step, seconds: float, clock: Clock) -> int:
    """How many steps fill a block of about so many seconds; at least one."""
    count = 1
    while True:
        taken = time_block(step, count, clock)
        if taken >= seconds / 4 or count >= MOST_STEPS:
            wanted = round(count * seconds / taken) if taken > 0 else MOST_STEPS
            return min(max(wanted, 1), MOST_STEPS)
        count = min(4 * count, MOST_STEPS)


def interleave(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    seconds: float,
    clock: Clock,
    on_block: Callable[[str], object] = lambda name: None,
) -> Timings:
    """Time steps that are warm already, in blocks that take turns.

    A step that raises is given up, with its error noted; the others go on.

    Args:
        steps: Name -> makes one step.
        rounds: Blocks of each.
        seconds: About how long a block takes.
        clock: Seconds, when all work that was begun is done.
        on_block: Called before each block with the name of its step.
    """
    timings = Timings()
    for name, step in steps.items():
        with _giving_up(name, timings):
            on_block(name)
            timings.steps[name] = steps_per_block(step, seconds, clock)
            timings.seconds[name] = []
    for number in range(rounds):
        names = list(timings.seconds)
        for name in names if number % 2 == 0 else names[::-1]:
            with _giving_up(name, timings):
                on_block(name)
                count = timings.steps[name]
                timings.seconds[name].append(time_block(steps[name], count, clock) / count)
    return timings


@contextmanager
def _giving_up(name: str, timings: Timings) -> Iterator[None]:
    """Turn an error into a note, and leave that step out from there on."""
    try:
        yield
    except Exception as error:
        timings.errors[name] = reason(error)
        timings.seconds.pop(name, None)


def reason(error: BaseException) -> str:
    """An error in one line, short enough for a table's footnote."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    text = f"{name}: {lines[0]}" if lines else name
    if isinstance(error, VirtualGradError):  # they say what they are
        text = lines[0]
    return text if len(text) <= 300 else f"{text[:297]}..."
