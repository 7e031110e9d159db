"""The readings of SVGD that the paper and its released code leave open, as data.

Algorithm 1 as printed and the code behind the paper's tables differ in what T divides by, in the
unit of g and in where T acts; whether r should know positions is a question to both. A reading is
the released method with one of these choices changed. All else, learning rates and s included, is
that of the recipe's column ``svgd``, so whatever a reading gains or loses is its own.

**Matching units.** With m samples a batch, g of one sample's loss is m times that of the batch's
mean loss, and r, a mean of g^2, is m^2 times as large:

    m s / sqrt(m^2 r + m^2 eps) = s / sqrt(r + eps)

So ``per-sample`` (scale m s, eps m^2 1e-6) is the released method up to rounding, and exactly where
m is a power of two. ``per-sample-as-printed`` keeps Algorithm 1's
eps = 1e-6, which there is worth m^2 times less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.recipes import Recipe, Tuned
from virtualgrad.sites import every_linear_site, weights_only

COLUMN = "svgd"
BASE = "released"

READINGS = {
    BASE: "released",
    "updated-first": "r updated first",
    "per-sample": "per sample",
    "per-sample-as-printed": "per sample, ε as printed",
    "every-linear-op": "every linear op",
    "shared-positions": "r shared over positions",
    "algorithm-1": "Algorithm 1",
}
"""Name of a reading -> what it is called in tables."""

LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "mlp": {"shared-positions": "an MLP has no positions, so it would be the released reading"}
}
"""Recipe -> readings that it does without -> why."""

# SVGD.released with every choice spelled out, so that a record of a run tells them all.
_RELEASED: Mapping[str, Any] = {
    "scale": 1.0,
    "eps": 1e-6,
    "per_sample": False,
    "stale": True,
    "share_positions": False,
    "where": weights_only,
}


def reading_names(recipe: str) -> tuple[str, ...]:
    """The readings that a recipe of this name is trained with, in the order of its table."""
    return tuple(name for name in READINGS if name not in LEFT_OUT.get(recipe, {}))


def with_readings(recipe: Recipe) -> Recipe:
    """The same experiment with the readings of SVGD in place of the optimizers of its table.

    Raises:
        HyperparameterError: The recipe has no column ``svgd`` to take learning rates and s from.
    """
    column = recipe.optimizers.get(COLUMN)
    if column is None:
        raise HyperparameterError.of(
            given=f"the recipe {recipe.name!r} without the optimizer {COLUMN!r}",
            allowed=f"a recipe with it; here: {', '.join(recipe.optimizers)}",
            todo=f"give the recipe an optimizer {COLUMN!r}, with its learning rates and scale",
        )
    return replace(recipe, optimizers=_readings(column, recipe))


def _readings(column: Tuned, recipe: Recipe) -> dict[str, Tuned]:
    released = {**_RELEASED, **column.options}
    m = recipe.batch_size
    per_sample = {"per_sample": True, "scale": m * released["scale"]}
    changes: dict[str, dict[str, Any]] = {
        BASE: {},
        "updated-first": {"stale": False},
        "per-sample": {**per_sample, "eps": m**2 * released["eps"]},
        "per-sample-as-printed": per_sample,
        "every-linear-op": {"where": every_linear_site},
        "shared-positions": {"share_positions": True},
        "algorithm-1": {**per_sample, "stale": False, "where": every_linear_site},
    }
    return {
        name: Tuned(column.method, column.lr, {**released, **changes[name]})
        for name in reading_names(recipe.name)
    }
