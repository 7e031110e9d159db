"""The networks of the benchmark, as data: how to build each, and what to feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad.lab.bench.modern import GPT, ResNet50, ViT
from virtualgrad.lab.networks import MLP, VGG, ResNet20

Inputs = Callable[[int], tuple[Tensor, Tensor]]
"""Batch size -> x and y, random, on torch's default device."""


@dataclass(frozen=True)
class Network:
    """A network and its work.

    Attributes:
        name: In options and records.
        title: In tables.
        build: Makes the model on torch's default device.
        inputs: Makes a batch there.
        batch_size: Samples in a batch.
        loss: Of the model's output and y, averaged over the batch.
        images: Whether it convolves images, which are laid out channels-last on a GPU.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor]
    images: bool = False


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples, and over the positions of sequences."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def images(channels: int, side: int, classes: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Noise with random labels; not zeros, which a GPU multiplies faster."""
    return torch.randn(batch_size, channels, side, side), torch.randint(classes, (batch_size,))


def tokens(vocabulary: int, length: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and random ones to predict."""
    shape = (batch_size, length)
    return torch.randint(vocabulary, shape), torch.randint(vocabulary, shape)


_PAPER = (
    Network("mlp", "MLP", MLP, partial(images, 1, 28, 10), 32, cross_entropy),
    Network("vgg", "VGG", VGG, partial(images, 3, 32, 10), 128, cross_entropy, images=True),
    Network(
        "resnet20", "ResNet-20", ResNet20, partial(images, 3, 32, 10), 128, cross_entropy, True
    ),
)
_MODERN = (
    Network(
        "resnet50", "ResNet-50", ResNet50, partial(images, 3, 224, 1000), 128, cross_entropy, True
    ),
    Network("vit", "ViT-S/16", ViT, partial(images, 3, 224, 1000), 128, cross_entropy, True),
    Network("gpt2", "GPT-2 small", GPT, partial(tokens, 50257, 1024), 8, cross_entropy),
)

NETWORKS = {network.name: network for network in _PAPER + _MODERN}
"""The paper's three and three of today, at the sizes people train them."""

ON_CPU = tuple(network.name for network in _PAPER)
"""What a CPU is asked by default: one step of the others takes it minutes."""


TINY = "-tiny"
"""Ends the name of a tiny network."""


def tiny(network: Network) -> Network:
    """The same kind of network, so small that a step takes milliseconds anywhere."""
    sizes: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
        "vgg": (VGG, partial(images, 3, 8, 10)),
        "resnet20": (ResNet20, partial(images, 3, 8, 10)),
        "resnet50": (partial(ResNet50, 4, (1, 1, 1, 1), 10), partial(images, 3, 32, 10)),
        "vit": (
            partial(ViT, 32, features=16, depth=1, heads=2, classes=10),
            partial(images, 3, 32, 10),
        ),
        "gpt2": (partial(GPT, 31, 8, features=16, depth=1, heads=2), partial(tokens, 31, 8)),
    }
    build, inputs = sizes.get(network.name, (network.build, network.inputs))
    return replace(
        network,
        name=network.name + TINY,
        title=f"{network.title}, tiny",
        build=build,
        inputs=inputs,
        batch_size=4,
    )
