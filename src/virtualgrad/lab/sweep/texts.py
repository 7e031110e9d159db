"""Results for other programs: a recipe to paste, and everything as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from virtualgrad.lab.sweep.results import Result
from virtualgrad.lab.sweep.sensitivity import WITHIN


def snippet(results: Sequence[Result]) -> str:
    """The best settings as entries of a recipe, to paste."""
    recipe = results[0].recipe
    lines = [f"# Best settings of a sweep: {recipe.title}, {recipe.steps:,} steps."]
    if recipe.milestones:
        lines.append(
            f"# The learning rate changes at steps {', '.join(map(str, recipe.milestones))}."
        )
    lines.append("optimizers={")
    for result in results:
        best = result.tuned
        options = f", {json.dumps(dict(best.options))}" if best.options else ""
        error = result.best.spread
        spread = "" if error.sd is None else f" ± {error.sd:.2f}"
        lines.append(
            f'    "{result.optimizer}": Tuned("{best.method}", {best.lr!r}{options}),'
            f"  # {error.mean:.2f}{spread} %"
        )
    return "\n".join([*lines, "}"]) + "\n"


def summary(results: Sequence[Result], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain data, for other programs."""
    return {
        "recipe": results[0].recipe.name,
        **identity,
        "optimizers": {result.optimizer: _numbers(result) for result in results},
    }


def _numbers(result: Result) -> dict[str, Any]:
    spread = result.best.spread
    return {
        "best": {
            "settings": dict(result.best.settings),
            "lr": list(result.tuned.lr),
            "errors": list(spread.values),
            "mean": spread.mean,
            "sd": spread.sd,
            "interval": spread.interval,
        },
        "share": result.share,
        "within": WITHIN,
        "ranges": {name: [of.low, of.high] for name, of in result.space.ranges.items()},
        "trials": [
            {
                "number": trial.number,
                "settings": dict(trial.settings),
                "end": trial.end.value,
                "errors": list(trial.errors),
            }
            for trial in result.trials
        ],
    }
