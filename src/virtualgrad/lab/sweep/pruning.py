"""When a trial is hopeless: far behind what other trials had reached by the same step.

The usual rule (worse than the median) would also stop settings that are a little worse than many
good ones, and then nobody knows how wide the good range is. This one asks for a distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MARGIN = 5.0
"""Points that a hopeless trial is behind the upper quartile of finished trials."""

LEAST_FINISHED = 5
"""Finished trials without which none is called hopeless."""


def hopeless(curve: dict[int, float], finished: Sequence[dict[int, float]], warm_up: int) -> bool:
    """Whether a trial should be given up after the last step of its curve.

    Args:
        curve: Step -> mean error of the trial, in percent.
        finished: The same of trials that came to their end.
        warm_up: No trial is given up before this step.
    """
    step = max(curve)
    if step < warm_up:
        return False
    reached = [_lowest(other, step) for other in finished if step in other]
    if len(reached) < LEAST_FINISHED:
        return False
    return _lowest(curve, step) > float(np.quantile(reached, 0.75)) + MARGIN


def _lowest(curve: dict[int, float], step: int) -> float:
    """The lowest error until a step: one that fluctuates is not given up in a bad moment."""
    return min(error for at, error in curve.items() if at <= step)
