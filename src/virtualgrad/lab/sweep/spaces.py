"""What is searched, as data: for each optimizer the ranges of its settings, all log-uniform.

Every range spans four decades, so that the shares of them that do well can be compared. They hold
the settings of all the paper's tables. A range of your own is another entry:

    SPACES["mine"] = Space("mine", "Mine", column="adam", ranges={"lr": Range(1e-5, 1e-1)})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from virtualgrad.lab.optimizers import OPTIMIZERS, hidden_matrices
from virtualgrad.lab.recipes import Recipe, Tuned

LR = "lr"
SCALE = "scale"

EVALUATIONS = 10
"""A shortened recipe looks at the test set at least so often: pruning needs something to see."""


@dataclass(frozen=True)
class Range:
    """The positive numbers from low to high, uniform in their logarithm."""

    low: float
    high: float

    @property
    def decades(self) -> float:
        """The width, log10(high / low)."""
        return math.log10(self.high / self.low)

    def place(self, value: float) -> float:
        """Where a value lies: 0 at low, 1 at high, and even steps for even factors."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def at(self, place: float) -> float:
        """The value at a place from 0 to 1."""
        return self.low * math.pow(self.high / self.low, place)


@dataclass(frozen=True)
class Space:
    """What is searched for one optimizer.

    Attributes:
        method: its name in :data:`virtualgrad.lab.optimizers.OPTIMIZERS`.
        title: what it is called in tables.
        column: optimizer of the recipe whose ratios between the phases' learning rates it keeps.
        ranges: setting -> range; ``lr`` is that of the first phase.
    """

    method: str
    title: str
    column: str
    ranges: Mapping[str, Range]


SPACES: dict[str, Space] = {
    space.method: space
    for space in (
        Space("sgd", "SGD", "sgd", {LR: Range(1e-3, 10)}),
        Space("sgd-momentum", "Momentum", "sgd", {LR: Range(1e-4, 1)}),
        Space("rmsprop", "RMSProp", "rmsprop", {LR: Range(1e-5, 1e-1)}),
        Space("adam", "Adam", "adam", {LR: Range(1e-5, 1e-1)}),
        Space("adamw", "AdamW", "adam", {LR: Range(1e-5, 1e-1)}),
        Space("muon", "Muon", "adam", {LR: Range(1e-5, 1e-1)}),
        Space("svgd", "SVGD", "svgd", {LR: Range(1e-3, 10), SCALE: Range(1e-4, 1)}),
    )
}
"""Name of an optimizer -> what is searched for it."""


def why_not(recipe: Recipe, optimizer: str) -> str | None:
    """Why an optimizer of :data:`SPACES` cannot train a recipe; None if it can."""
    space = SPACES[optimizer]
    if space.method not in OPTIMIZERS:
        return f"this version of PyTorch has no {space.title}"
    if space.column not in recipe.optimizers:
        return f"the recipe has no {space.column}, whose learning rates it would follow"
    if space.method == "muon" and not hidden_matrices(recipe.network()):
        return "Muon steps matrices alone, and the network has no linear layer inside"
    return None


def tuned(recipe: Recipe, optimizer: str, settings: Mapping[str, float]) -> Tuned:
    """An optimizer with searched settings: phases keep the ratios that the recipe has."""
    space = SPACES[optimizer]
    rates = recipe.optimizers[space.column].lr
    options = {name: value for name, value in settings.items() if name != LR}
    lr = tuple(settings[LR] * rate / rates[0] for rate in rates)
    return Tuned(space.method, lr, options)


def shortened(recipe: Recipe, steps: int | None) -> Recipe:
    """The recipe with another number of steps, its schedule stretched to fit."""
    if steps is None:
        return recipe
    stretched = (round(milestone * steps / recipe.steps) for milestone in recipe.milestones)
    return replace(
        recipe,
        steps=steps,
        milestones=tuple(stretched),
        evaluate_every=min(recipe.evaluate_every, max(1, steps // EVALUATIONS)),
    )
