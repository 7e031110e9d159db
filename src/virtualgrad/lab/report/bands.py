"""Learning curves over seeds: a mean and a band of one standard deviation around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from virtualgrad.lab.report.sections import Cell

Quantity = Literal["train_loss", "test_loss", "test_error"]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """One optimizer's curve.

    Attributes:
        steps: When it was evaluated.
        mean: Over seeds; NaN where a run gave no finite number.
        sd: Sample standard deviation over seeds; zero if there is one seed.
    """

    steps: Values
    mean: Values
    sd: Values

    @property
    def low(self) -> Values:
        """The lower edge; a sliver above zero where it would fall below, for a log scale."""
        return np.maximum(self.mean - self.sd, 1e-3 * self.mean)

    @property
    def high(self) -> Values:
        """The upper edge."""
        return self.mean + self.sd

    def after(self, step: float) -> Band:
        """The part of the curve behind a step."""
        later = self.steps > step
        return Band(self.steps[later], self.mean[later], self.sd[later])


def band(cell: Cell, quantity: Quantity) -> Band:
    """Take mean and deviation of a quantity over the runs of a cell."""
    values = np.array([getattr(run.curve, quantity) for run in cell.runs], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    sd = values.std(axis=0, ddof=1) if len(cell.runs) > 1 else np.zeros(values.shape[1])
    return Band(np.array(cell.runs[0].curve.step, dtype=np.float64), values.mean(axis=0), sd)


def limits(bands: Iterable[Band]) -> tuple[float, float]:
    """The least and the greatest value that any band reaches; 0 and 1 if all are empty."""
    edges = np.array([value for b in bands for edge in (b.low, b.high) for value in edge])
    edges = edges[np.isfinite(edges)]
    return (float(edges.min()), float(edges.max())) if len(edges) else (0.0, 1.0)


def near_best(bands: Mapping[str, Band], ratio: float, slack: float) -> dict[str, Band]:
    """The bands that end at most at ratio * lowest end + slack; others would flatten these."""
    ends = {name: float(b.mean[-1]) for name, b in bands.items()}
    lowest = min((end for end in ends.values() if np.isfinite(end)), default=0.0)
    return {name: b for name, b in bands.items() if ends[name] <= ratio * lowest + slack}
