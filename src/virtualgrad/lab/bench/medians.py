"""The statistics of repeated timings: medians, and what lies between the quartiles.

A median forgives the odd block that something else on the machine disturbed; a mean does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class Median:
    """A median, and the quartiles between which the middle half of the values lies.

    Attributes:
        value: The median.
        lower: The first quartile.
        upper: The third.
    """

    value: float
    lower: float
    upper: float

    @property
    def spread(self) -> float:
        """The interquartile range."""
        return self.upper - self.lower


def median_of(values: Sequence[float]) -> Median:
    """Median and quartiles, those of the sample itself: its ends are the 0 % and the 100 %.

    Example:
        >>> median_of([1.0, 2.0, 3.0, 4.0, 100.0])
        Median(value=3.0, lower=2.0, upper=4.0)
    """
    if len(values) == 1:
        return Median(values[0], values[0], values[0])
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return Median(median(values), lower, upper)


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> Median:
    """The median of the ratios to a reference **of the same round**.

    Blocks of one round are neighbours in time, so what drifts slowly (clocks, heat, other users)
    cancels in their ratio; it would not in the ratio of two medians.

    Args:
        times: One per round.
        reference: Likewise.
    """
    return median_of([time / unit for time, unit in zip(times, reference, strict=True)])
