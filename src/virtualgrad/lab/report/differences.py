"""Differences between two kinds of runs, taken seed by seed.

Runs of one seed start from the same weights and see the same batches, so their difference is taken
first and its spread afterwards: what a seed does to both of them drops out.
"""

from __future__ import annotations

from collections.abc import Callable

from virtualgrad.lab.record import Record
from virtualgrad.lab.report.sections import Cell
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.report.tables import NONE, Entry, signed


def paired(cell: Cell, base: Cell, value: Callable[[Record], float]) -> Spread | None:
    """A number of one cell's runs minus that of another's, for each seed that both have."""
    of_base = {run.seed: value(run) for run in base.runs}
    values = tuple(value(run) - of_base[run.seed] for run in cell.runs if run.seed in of_base)
    return Spread(values) if values else None


def beyond_noise(difference: Spread | None) -> bool:
    """Whether zero lies outside the 95 % interval of a difference."""
    interval = difference.interval if difference else None
    return interval is not None and not interval[0] <= 0 <= interval[1]


def difference_entry(difference: Spread | None) -> Entry:
    """The mean of a difference, with its standard error; it stands out if it is beyond noise."""
    if difference is None:
        return Entry()
    error = difference.standard_error
    return Entry(
        signed(difference.mean),
        NONE if error is None else f"{error:.2f}",
        best=beyond_noise(difference),
    )
