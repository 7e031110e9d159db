"""Mean and standard deviation over seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % point of Student's t with 1, 2, ... degrees of freedom; for more, the last will do."""


@dataclass(frozen=True)
class Spread:
    """One number, measured once per seed.

    Attributes:
        values: The measurements; at least one.

    Example:
        >>> spread = Spread((1.0, 2.0, 3.0))
        >>> spread.mean, spread.sd
        (2.0, 1.0)
        >>> Spread((1.0,)).sd is None
        True
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return fmean(self.values)

    @property
    def sd(self) -> float | None:
        """The sample standard deviation (n - 1 in the denominator); None for one measurement."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean, sd / sqrt(n)."""
        return None if self.sd is None else self.sd / math.sqrt(len(self.values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None for one measurement."""
        if self.standard_error is None:
            return None
        freedom = len(self.values) - 1
        reach = T_95[min(freedom, len(T_95)) - 1] * self.standard_error
        return self.mean - reach, self.mean + reach

    def error_of_difference(self, other: Spread) -> float | None:
        """The standard error of the difference of two means: sqrt(sd1^2 / n1 + sd2^2 / n2)."""
        if self.sd is None or other.sd is None:
            return None
        return math.hypot(
            self.sd / math.sqrt(len(self.values)), other.sd / math.sqrt(len(other.values))
        )

    def is_clearly_below(self, other: Spread) -> bool:
        """Whether the other mean lies more than two standard errors of the difference above."""
        error = self.error_of_difference(other)
        return error is not None and other.mean - self.mean > 2 * error
