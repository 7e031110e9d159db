"""How often each method crosses the local valleys of :mod:`.valleys` and finds the deepest one.

Measured (100 starts, each method at its best of 22 learning rates, seeds 0 to 3), in %:

    k        gradient   RMSProp   virtual, RMS
    1/6      83 - 94    95 - 97   86 - 91
    1        64 - 73    81 - 86   85 - 93
    6        23 - 28    63 - 67   85 - 94
    30       25 - 31    66 - 69   85 - 91

T on sigma does not see k: alpha = 0.3 to 0.5 is best at every k. T on theta does, and wins where
sigma_2 is the steep direction (k = 1/6).

This is an illustration, not a law. The landscape was chosen, among several tried, to have different
scales in sigma; on some with equal scales gradient descent found the deepest valley more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from virtualgrad.lab.figures.valleys import VIRTUAL, Method, Paths, descend


@dataclass(frozen=True)
class Success:
    """How often a method finds the deepest valley, by alpha.

    Attributes:
        method: the method.
        k: steepness of F along sigma_1.
        starts: how many.
        alphas: learning rates of the first step.
        reached: fraction of the starts.
    """

    method: Method
    k: float
    starts: int
    alphas: tuple[float, ...]
    reached: tuple[float, ...]

    @property
    def best(self) -> tuple[float, float]:
        """The alpha that reaches most, and the fraction."""
        return max(zip(self.alphas, self.reached, strict=True), key=lambda pair: pair[1])

    @property
    def good_and_small(self) -> float:
        """The smallest alpha that reaches three quarters of the best: its paths are legible."""
        good = 0.75 * self.best[1]
        return next(a for a, part in zip(self.alphas, self.reached, strict=True) if part >= good)


def measure_success(
    method: Method, start: Tensor, alphas: Sequence[float], steepness: Sequence[float]
) -> list[Success]:
    """Descend from every start with every alpha on every F, all at once.

    Args:
        method: the method.
        start: (starts, 2), theta(0).
        alphas: the learning rates.
        steepness: the values of k.
    """
    shape = (len(steepness), len(alphas), len(start))
    ks = torch.tensor(steepness, dtype=start.dtype)[:, None, None].expand(shape).flatten()
    rates = torch.tensor(alphas, dtype=start.dtype)[:, None].expand(shape).flatten()
    paths = descend(start.expand(*shape, 2).reshape(-1, 2), rates, method, k=ks)
    fractions = paths.reached.double().view(shape).mean(-1)
    return [
        Success(method, k, len(start), tuple(alphas), tuple(row.tolist()))
        for k, row in zip(steepness, fractions, strict=True)
    ]


def pick_paths(start: Tensor, alphas: Mapping[Method, float]) -> dict[Method, Paths]:
    """One path of each method from a common start, chosen to be seen.

    Preferred are starts from which the virtual gradient descent alone finds the deepest valley;
    among them, the one whose paths are the shortest, and so the most legible. It is an
    illustration: what happens on all starts is in :class:`Success`.

    Args:
        start: (starts, 2), theta(0).
        alphas: learning rate of each method.
    """
    paths = {
        method: descend(start, start.new_full((len(start),), alpha), method)
        for method, alpha in alphas.items()
    }
    lengths = [path.image.diff(dim=0).norm(dim=-1).sum(0) for path in paths.values()]
    cost = torch.stack(lengths).sum(0)
    for method, path in paths.items():
        # Any number of wrong outcomes is worse than any length of a path that did not diverge.
        wrong = path.reached != (method == VIRTUAL)
        cost = cost + 1e6 * wrong
    i = int(cost.argmin())
    return {
        method: Paths(path.theta[:, i : i + 1], path.image[:, i : i + 1], path.sigma[:, i : i + 1])
        for method, path in paths.items()
    }
