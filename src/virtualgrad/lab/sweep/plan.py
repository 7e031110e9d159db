"""From what is asked for to the searches that answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from virtualgrad.lab.recipes import RECIPES, Recipe
from virtualgrad.lab.run import Setup
from virtualgrad.lab.sweep.objective import Training
from virtualgrad.lab.sweep.search import Search
from virtualgrad.lab.sweep.spaces import SPACES, why_not

ALL = "all"


@dataclass(frozen=True)
class Sweep:
    """What to compare: optimizers on a recipe, each with the same number of trials.

    Attributes:
        recipe: what to train.
        optimizers: names in :data:`virtualgrad.lab.sweep.spaces.SPACES`.
        trials: finished trials of each.
        seeds: runs of each trial.
        setup: device and number format.
        data: what the data set is called; a stand-in has another name.
        name: of the studies, before the optimizer's.
    """

    recipe: Recipe
    optimizers: Sequence[str]
    trials: int
    seeds: int
    setup: Setup
    data: str
    name: str

    @property
    def identity(self) -> dict[str, Any]:
        """What trials must have in common to be compared, as plain data; not the device."""
        return {
            "recipe": self.recipe.name,
            "data": self.data,
            "batch_size": self.recipe.batch_size,
            "steps": self.recipe.steps,
            "milestones": list(self.recipe.milestones),
            "l1": self.recipe.l1,
            "evaluate_every": self.recipe.evaluate_every,
            "seeds": self.seeds,
            "amp": self.setup.amp,
        }

    def searches(self) -> list[Search]:
        """One for each optimizer."""
        return [self._search(optimizer) for optimizer in self.optimizers]

    def _search(self, optimizer: str) -> Search:
        space = SPACES[optimizer]
        rates = self.recipe.optimizers[space.column].lr
        return Search(
            name=f"{self.name}-{optimizer}",
            title=f"{self.recipe.title}, {space.title}",
            ranges=space.ranges,
            identity={**self.identity, "phases": [rate / rates[0] for rate in rates]},
            make=Training(self.recipe, optimizer, self.seeds, self.setup),
            trials=self.trials,
            warm_up=self.recipe.steps // 3,  # what is slow at first may well end ahead
        )


def recipe_named(name: str) -> Recipe:
    """The recipe that is asked for."""
    if name not in RECIPES:
        found = f"{name!r} is none of" if name else "missing: choose one of"
        raise typer.BadParameter(f"{found} {', '.join(RECIPES)}", param_hint="the recipe")
    return RECIPES[name]


def optimizers_named(given: str, recipe: Recipe) -> tuple[list[str], list[str]]:
    """The optimizers that are asked for, and a sentence for each that ``all`` leaves out."""
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    reasons = {name: why_not(recipe, name) for name in SPACES}
    if names == [ALL]:
        left_out = [
            f"Left out: {SPACES[name].title}; {reason}."
            for name, reason in reasons.items()
            if reason
        ]
        return [name for name, reason in reasons.items() if reason is None], left_out
    for name in names or [given]:
        if name not in SPACES:
            allowed = ", ".join([*SPACES, ALL])
            raise typer.BadParameter(f"{name!r} is none of {allowed}", param_hint="--optimizer")
        if reasons[name]:
            raise typer.BadParameter(
                f"{name!r} cannot train {recipe.name}: {reasons[name]}", param_hint="--optimizer"
            )
    return names, []
