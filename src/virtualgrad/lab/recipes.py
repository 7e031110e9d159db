"""The paper's experiments as data: one frozen record per table, nothing to run.

Networks, data handling and loss follow the authors' released code; learning rates, s and the
errors to compare with are the paper's tables. A recipe of your own is another such record:

    RECIPES["mine"] = Recipe("mine", MyNetwork, "mnist", batch_size=64, steps=1_000, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.networks import MLP, VGG, ResNet20


@dataclass(frozen=True)
class Tuned:
    """An optimizer with the settings that a table gives it.

    Attributes:
        method: name of the optimizer in :data:`virtualgrad.lab.optimizers.OPTIMIZERS`.
        lr: alpha in each phase of the schedule.
        options: further settings, such as ``scale`` (s).
        paper_error: lowest test error in the paper's table, in percent; None if it has none.
    """

    method: str
    lr: tuple[float, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    paper_error: float | None = None


@dataclass(frozen=True)
class Recipe:
    """One experiment: a network, its data, and how each optimizer trains it.

    Attributes:
        name: what it is called on the command line.
        title: what it is called in tables.
        network: makes the network.
        data: name of the data set, ``"mnist"`` or ``"cifar10"``.
        batch_size: m.
        steps: number of training steps.
        milestones: steps at which the learning rate changes to its next phase.
        l1: factor of the L1 penalty on weights and biases.
        evaluate_every: steps between two looks at the test set.
        test_batch: batch size at test time (it matters: batch norm uses batch statistics).
        optimizers: name -> optimizer with its settings.
    """

    name: str
    title: str
    network: Callable[[], nn.Module]
    data: str
    batch_size: int
    steps: int
    milestones: tuple[int, ...]
    l1: float
    evaluate_every: int
    test_batch: int
    optimizers: Mapping[str, Tuned]

    def __post_init__(self) -> None:
        for name, tuned in self.optimizers.items():
            if len(tuned.lr) != len(self.milestones) + 1:
                raise HyperparameterError.of(
                    given=f"{len(tuned.lr)} learning rates for {name} in the recipe {self.name!r}",
                    allowed=f"one per phase, {len(self.milestones) + 1} here",
                    todo="give one more learning rate than milestones",
                )

    def phase(self, step: int) -> int:
        """Number of milestones that lie behind."""
        return sum(step >= milestone for milestone in self.milestones)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="mlp",
            title="MLP on MNIST",
            network=MLP,
            data="mnist",
            batch_size=32,
            steps=6_000,
            milestones=(1_600, 3_600),
            l1=1e-4,
            evaluate_every=100,
            test_batch=10_000,
            optimizers={
                "rmsprop": Tuned("rmsprop", (1e-3, 5e-4, 5e-5), paper_error=1.80),
                "adam": Tuned("adam", (1e-3, 5e-5, 5e-5), paper_error=1.94),
                "sgd": Tuned("sgd", (0.1, 0.05, 0.01), paper_error=1.76),
                "svgd": Tuned("svgd", (0.01, 0.005, 0.001), {"scale": 0.1}, paper_error=1.60),
            },
        ),
        Recipe(
            name="vgg",
            title="VGG on CIFAR-10",
            network=VGG,
            data="cifar10",
            batch_size=128,
            steps=35_000,
            milestones=(12_000, 24_000),
            l1=1e-5,
            evaluate_every=1_000,
            test_batch=1_000,
            optimizers={
                "rmsprop": Tuned("rmsprop", (0.02, 0.01, 0.002), paper_error=17.78),
                "adam": Tuned("adam", (0.02, 0.01, 0.005), paper_error=18.02),
                "sgd": Tuned("sgd", (2.0, 0.5, 0.005), paper_error=17.32),
                "svgd": Tuned("svgd", (2.0, 0.5, 0.005), {"scale": 0.001}, paper_error=17.07),
            },
        ),
        Recipe(
            name="resnet20",
            title="ResNet-20 on CIFAR-10",
            network=ResNet20,
            data="cifar10",
            batch_size=128,
            steps=50_000,
            milestones=(32_000, 42_000),
            l1=1e-4,
            evaluate_every=1_000,
            test_batch=1_000,
            optimizers={
                "rmsprop": Tuned("rmsprop", (1e-3, 1e-4, 1e-4), paper_error=11.18),
                "adam": Tuned("adam", (1e-3, 1e-4, 5e-5), paper_error=11.12),
                "sgd": Tuned("sgd", (0.1, 0.01, 0.001), paper_error=10.69),
                "svgd": Tuned("svgd", (0.5, 0.02, 0.01), {"scale": 0.01}, paper_error=8.62),
            },
        ),
    )
}
"""Name -> recipe."""
