"""Ways to settings of SVGD, applied to a recipe: its own, the rules, ``suggest``, a sweep's best.

All but the first and the last know nothing of the recipe's SVGD, only the rates that its table
gives SGD, RMSProp and Adam. Later phases keep the ratios of the optimizer that the rate comes from,
as the paper states its rules for every time t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import Optimizer

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.batches import Batches
from virtualgrad.lab.data import ImageData
from virtualgrad.lab.recipes import Recipe, Tuned
from virtualgrad.lab.run import Setup
from virtualgrad.optim import SVGD
from virtualgrad.settings import suggest

OWN, SWEPT = "own", "swept"
SEED = 0  # of the weights and batches that settings are found with
BATCHES = 8

WAYS = {
    OWN: "the paper's settings",
    "rules": "`from_sgd`, α of SGD and RMSProp",
    "rule-sgd": "`from_sgd`, α of SGD",
    "suggest-sgd": "`suggest`, from SGD",
    "suggest-rmsprop": "`suggest`, from RMSProp",
    "suggest-adam": "`suggest`, from Adam",
    SWEPT: "best of a sweep",
}
"""Name of a way -> what it is called in tables."""

CURRENT: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
}
"""Optimizer of a recipe -> the one of torch.optim that stands for it."""


@dataclass(frozen=True)
class Found:
    """Settings that a way has found.

    Attributes:
        way: its name in :data:`WAYS`.
        tuned: the settings, as a recipe has them.
        details: reasons, sizes and trials of a suggestion, as plain data.
    """

    way: str
    tuned: Tuned
    details: dict[str, Any]


def find_settings(recipe: Recipe, data: ImageData, setup: Setup) -> list[Found]:
    """Settings by every way but a sweep.

    Raises:
        HyperparameterError: The recipe lacks one of the optimizers to start from.
    """
    missing = [name for name in ("svgd", *CURRENT) if name not in recipe.optimizers]
    if missing:
        raise HyperparameterError.of(
            given=f"the recipe {recipe.name!r} without {missing[0]}",
            allowed=f"a recipe with svgd, {', '.join(CURRENT)}",
            todo="add it, with learning rates that work",
        )
    rates = {name: recipe.optimizers[name].lr[0] for name in CURRENT}
    return [
        Found(OWN, recipe.optimizers["svgd"], {}),
        Found("rules", _by_rule(recipe, rates["sgd"], rates["rmsprop"]), {}),
        Found("rule-sgd", _by_rule(recipe, rates["sgd"]), {}),
        *(_suggested(recipe, name, data, setup) for name in CURRENT),
    ]


def _by_rule(recipe: Recipe, *rates: float) -> Tuned:
    with SVGD.from_sgd(recipe.network(), *rates) as optimizer:
        group = optimizer.param_groups[0]
        return _tuned(recipe, "sgd", group["lr"], group["scale"])


def _suggested(recipe: Recipe, name: str, data: ImageData, setup: Setup) -> Found:
    torch.manual_seed(SEED)
    model = recipe.network().to(setup.device)
    batches = Batches(data, recipe.batch_size, SEED, setup.device, setup.channels_last)
    batches.seek(0)
    few = [batches.next() for _ in range(BATCHES)]
    current = CURRENT[name](model.parameters(), lr=recipe.optimizers[name].lr[0])
    found = suggest(model, F.cross_entropy, few, current=current, count=BATCHES)
    details = {
        "reasons": list(found.reasons),
        "trials": asdict(found.trials),
        "sizes": [asdict(size) for size in found.sizes],
    }
    return Found(f"suggest-{name}", _tuned(recipe, name, found.lr, found.scale), details)


def _tuned(recipe: Recipe, source: str, lr: float, scale: float) -> Tuned:
    """Settings for all phases, the rates in the ratios that the source has."""
    phases = recipe.optimizers[source].lr
    rates = tuple(float(f"{lr * rate / phases[0]:.6g}") for rate in phases)
    return Tuned("svgd", rates, {"scale": float(f"{scale:.6g}")})
