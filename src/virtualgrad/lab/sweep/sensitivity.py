"""How much of a searched range does well, estimated from trials that are not spread evenly.

A search looks most where errors are low, so the share of *trials* that do well says little about
the share of the *range*. Here every place of the range counts with the error of the trial that is
nearest to it, in log space with each range scaled to [0, 1]: each trial stands for its Voronoi
cell, however crowded the trials are. In one dimension the cells end halfway between neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from virtualgrad.lab.sweep.search import End, Trial
from virtualgrad.lab.sweep.spaces import Range

WITHIN = 0.5
"""Points above the best that still count as doing well."""

CELLS = {1: 4096, 2: 192}
"""Number of dimensions -> cells of the grid along each."""


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the lowest mean error; pruned ones have no last error and do not count."""
    whole = [trial for trial in trials if trial.end is not End.PRUNED]
    return min(whole, key=lambda trial: (trial.spread.mean, trial.number), default=None)


def share_within(
    trials: Sequence[Trial], ranges: Mapping[str, Range], within: float = WITHIN
) -> float | None:
    """The share of the searched range whose error is within so many points of the best.

    A pruned or diverged trial counts as outside: it was far above others when it was stopped.

    Returns:
        A number from 0 to 1; None if no trial came to its end.
    """
    best = best_of(trials)
    if best is None or best.end is End.DIVERGED:
        return None
    limit = best.spread.mean + within
    well = np.array([t.end is End.COMPLETE and t.spread.mean <= limit for t in trials])
    return float(well[nearest(trials, ranges)].mean())


def nearest(trials: Sequence[Trial], ranges: Mapping[str, Range]) -> NDArray[np.intp]:
    """The index of the nearest trial in each cell of a grid; an axis per range, in their order."""
    count = CELLS[len(ranges)]
    middles = (np.arange(count) + 0.5) / count
    axes = np.meshgrid(*[middles] * len(ranges), indexing="ij")
    least = np.full(axes[0].shape, np.inf)
    index = np.zeros(axes[0].shape, dtype=np.intp)
    for number, trial in enumerate(trials):  # a trial at a time: the grid times all would be large
        places = [of.place(trial.settings[name]) for name, of in ranges.items()]
        far = sum((axis - place) ** 2 for axis, place in zip(axes, places, strict=True))
        closer = far < least
        least[closer], index[closer] = np.asarray(far)[closer], number
    return index
