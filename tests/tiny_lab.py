"""A data set, a network and a recipe so small that a whole experiment takes a moment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from virtualgrad.lab.data import ImageData
from virtualgrad.lab.recipes import Recipe, Tuned
from virtualgrad.lab.reproduce import Job
from virtualgrad.lab.run import Setup

OPTIMIZERS = {
    "sgd": Tuned("sgd", (0.1, 0.05)),
    "rmsprop": Tuned("rmsprop", (0.01, 0.005)),
    "adam": Tuned("adam", (0.01, 0.005)),
    "svgd": Tuned("svgd", (0.05, 0.02), {"scale": 0.1}),
}


class TinyNetwork(nn.Sequential):
    def __init__(self) -> None:
        norm = nn.BatchNorm1d(8, eps=1e-3, track_running_stats=False)
        super().__init__(nn.Linear(16, 8), norm, nn.ReLU(), nn.Linear(8, 10))


class TinyColourNetwork(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def tiny_data(*, train: int = 90, test: int = 40, name: str = "tiny") -> ImageData:
    """4 x 4 images of ten classes: a pattern per class, and noise."""
    return _data((1, 4, 4), train, test, name)


def tiny_colours(*, train: int = 90, test: int = 40) -> ImageData:
    """8 x 8 images in colour, of the same kind."""
    return _data((3, 8, 8), train, test, "tiny colours")


def _data(shape: tuple[int, ...], train: int, test: int, name: str) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 200, (10, *shape), generator=generator)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 10
        noise = torch.randint(0, 56, (count, *shape), generator=generator)
        return (patterns[labels] + noise).to(torch.uint8), labels

    return ImageData(name, "made up for tests", *draw(train), *draw(test))


TINY = Recipe(
    name="tiny",
    title="Tiny",
    network=TinyNetwork,
    data="tiny",
    batch_size=8,
    steps=40,
    milestones=(25,),
    l1=1e-3,
    evaluate_every=10,
    test_batch=16,
    optimizers=OPTIMIZERS,
)
TINY_COLOURS = replace(TINY, name="colours", network=TinyColourNetwork, data="colours")


def a_job(out: Path, *, recipe: Recipe = TINY, seeds: tuple[int, ...] = (0,), **how: Any) -> Job:
    """Train on the CPU, by SVGD unless `how` says otherwise."""
    optimizers = how.pop("optimizers", ("svgd",))
    return Job(recipe, optimizers, seeds, Setup(torch.device("cpu")), out, **how)
