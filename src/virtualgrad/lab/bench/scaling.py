"""How SVGD's cost grows: one small convolutional network, one size at a time.

The cost of T grows with g, that is with batch x image x width x depth, and so does the cost of the
network, times width x the window's nine pixels. So the ratio should fall with width, and stay level
along the other axes once the work fills the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from virtualgrad.lab.bench.measure import Case
from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import Mode, Precision
from virtualgrad.lab.bench.networks import Network, cross_entropy, images

CLASSES = 10
COMPARED = tuple(METHODS[name] for name in ("sgd", "svgd", "svgd-released"))


@dataclass(frozen=True)
class Size:
    """The four sizes of the network and its work.

    Attributes:
        batch: Samples in a batch.
        width: Channels.
        image: Side of the images.
        depth: Convolutions.
    """

    batch: int = 128
    width: int = 32
    image: int = 32
    depth: int = 4


AXES: dict[str, tuple[int, ...]] = {
    "batch": (16, 64, 256, 1024),
    "width": (8, 32, 128, 512),
    "image": (8, 16, 32, 64, 128),
    "depth": (1, 4, 16),
}
"""Axis -> its sizes, the other three as in `Size()`."""

TINY_AXES: dict[str, tuple[int, ...]] = {axis: (2, 4) for axis in AXES}
TINY = Size(2, 2, 4, 1)


class ConvNet(nn.Module):
    """3 x 3 convolutions of one width, each with batch norm and ReLU, and a linear layer.

    Args:
        width: Channels.
        depth: Convolutions.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for c_in in (3, *[width] * (depth - 1)):
            conv = nn.Conv2d(c_in, width, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, 10)."""
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def network_of(size: Size, axis: str) -> Network:
    """The network of a size, named after the axis along which it lies."""
    return Network(
        name=f"{axis}={getattr(size, axis)}",
        title=f"{axis} {getattr(size, axis)}",
        build=partial(ConvNet, size.width, size.depth),
        inputs=partial(images, 3, size.image, CLASSES),
        batch_size=size.batch,
        loss=cross_entropy,
        images=True,
    )


def scaling_cases(precision: Precision, mode: Mode, *, tiny: bool = False) -> Iterator[Case]:
    """SGD and two SVGDs at every size of every axis."""
    base, axes = (TINY, TINY_AXES) if tiny else (Size(), AXES)
    for axis, values in axes.items():
        for value in values:
            network = network_of(replace(base, **{axis: value}), axis)
            yield Case(network, precision, mode, COMPARED)


def place_of(model: str) -> tuple[str, int] | None:
    """The axis and the size that the name of a network tells; None for other networks."""
    axis, equals, value = model.partition("=")
    return (axis, int(value)) if equals and axis in AXES else None
