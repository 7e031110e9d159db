"""The objective of a search: train a recipe with given settings, all seeds side by side."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from rich.console import Console

from virtualgrad.errors import NonFiniteError
from virtualgrad.lab.batches import evaluation_set
from virtualgrad.lab.devices import choose_fast_kernels
from virtualgrad.lab.engine import Engine
from virtualgrad.lab.recipes import Recipe
from virtualgrad.lab.reproduce import load_data
from virtualgrad.lab.run import Run, Setup
from virtualgrad.lab.sweep.search import DivergedError, OnEvaluation
from virtualgrad.lab.sweep.spaces import tuned


@dataclass(frozen=True)
class Training:
    """How each trial of a search is trained; small, so that it can be sent to other processes.

    Attributes:
        recipe: what to train.
        optimizer: name in :data:`virtualgrad.lab.sweep.spaces.SPACES`.
        seeds: runs per trial, seeds 0, 1, ...
        setup: device and number format.
    """

    recipe: Recipe
    optimizer: str
    seeds: int
    setup: Setup

    def __call__(self) -> Trainer:
        """Load the data, and be ready to train."""
        return Trainer(self)


class Trainer:
    """Trains one trial after another on data that it keeps."""

    def __init__(self, training: Training) -> None:
        self.training = training
        recipe, setup = training.recipe, training.setup
        choose_fast_kernels(setup.device)
        # Quietly: the command has loaded them before, and said what there is to say.
        self.data = load_data(recipe.data, Console(quiet=True))
        self.held_out = evaluation_set(
            self.data, setup.device, recipe.test_batch, setup.channels_last
        )

    def __call__(
        self,
        settings: Mapping[str, float],
        on_evaluation: OnEvaluation,
        on_progress: Callable[[], None],
    ) -> tuple[float, ...]:
        """Train with some settings and return the last error of every seed, in percent.

        Raises:
            DivergedError: A loss or a gradient of some seed is not finite.
        """
        name, setup = self.training.optimizer, self.training.setup
        if setup.device.type == "cuda":  # pragma: no cover - needs a GPU
            gc.collect()  # models and their hooks are cycles, and the last trial's graph has a pool
            torch.cuda.empty_cache()
        column = {name: tuned(self.training.recipe, name, settings)}
        recipe = replace(self.training.recipe, optimizers=column)
        runs = [Run(recipe, name, seed, self.data, setup) for seed in range(self.training.seeds)]

        def look() -> None:
            curves = [run.record.curve for run in runs]
            losses = [loss for c in curves for loss in (c.train_loss[-1], c.test_loss[-1])]
            if not all(map(math.isfinite, losses)):
                raise DivergedError(f"the loss is not finite at step {runs[0].step:,}")
            on_evaluation(runs[0].step, fmean(curve.test_error[-1] for curve in curves))

        try:
            Engine(runs).train(self.held_out, look, on_progress)
        except NonFiniteError as error:
            raise DivergedError(str(error)) from error
        return tuple(run.record.final_error for run in runs)
