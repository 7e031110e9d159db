"""One search, and what comes of its trials; plain data that knows no database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.sweep.spaces import Range

DIVERGED = 100.0
"""The error, in percent, that settings count with whose training left the finite numbers."""

OnEvaluation = Callable[[int, float], None]
"""Hears a step and the mean error over seeds there; what it raises ends the trial."""

Objective = Callable[[Mapping[str, float], OnEvaluation, Callable[[], None]], tuple[float, ...]]
"""Settings, what hears of evaluations, what is called often -> the last error of every seed."""


class SweepError(VirtualGradError, RuntimeError):
    """A sweep cannot begin or go on."""


class DivergedError(VirtualGradError, ArithmeticError):
    """Training left the finite numbers."""


class End(Enum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        number: its number in the study.
        settings: what was tried, such as ``lr`` and ``scale``.
        end: how it ended.
        errors: the last test error of every seed, in percent; of a pruned trial the mean that it
            was at when it was stopped.
    """

    number: int
    settings: Mapping[str, float]
    end: End
    errors: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """The errors over seeds."""
        return Spread(self.errors)


@dataclass(frozen=True)
class Search:
    """What to search, and how much.

    Attributes:
        name: of the study, such as ``"mlp-svgd"``; unique in its database.
        title: for the display.
        ranges: setting -> range.
        identity: what must be the same for trials to belong together, as plain data.
        make: makes the objective, in the process that will call it; it can be pickled.
        trials: how many trials are to be finished.
        warm_up: step before which no trial is given up.
    """

    name: str
    title: str
    ranges: Mapping[str, Range]
    identity: Mapping[str, Any]
    make: Callable[[], Objective]
    trials: int
    warm_up: int = 0
