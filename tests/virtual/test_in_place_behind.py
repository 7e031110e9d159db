"""Ops in place behind a layer: what torch allows on a plain model is allowed on an attached one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD, VirtualGradientDescent
from virtualgrad.operators import identity

Layer = tuple[Callable[[], nn.Module], tuple[int, ...]]


class Product(nn.Module):
    """A product with a parameter, by one of torch's functions."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


LAYERS: dict[str, Layer] = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear on tokens": (lambda: nn.Linear(5, 4), (6, 3, 5)),
    "linear on images": (lambda: nn.Linear(5, 4), (6, 2, 3, 5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (6, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2), (6, 3, 5)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2), (6, 3, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 2), (6, 3, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(3, 4, 2), (6, 3, 5)),
    "matmul": (lambda: Product(torch.matmul, 5, 4), (6, 3, 5)),
    "matmul of a batch": (lambda: Product(torch.matmul, 3, 5, 4), (6, 3, 2, 5)),
    "from the left": (lambda: Product(lambda x, w: w @ x, 4, 3), (6, 3, 5)),
    "with a vector": (lambda: Product(torch.matmul, 5), (6, 3, 5)),
    "einsum": (lambda: Product(lambda x, w: torch.einsum("bti,io->bto", x, w), 5, 4), (6, 3, 5)),
    "batch norm": (lambda: nn.BatchNorm1d(3), (6, 3, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), (6, 3, 5)),
    "group norm": (lambda: nn.GroupNorm(1, 3), (6, 3, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (6, 3, 5)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_in_place_ops_behind_a_layer(layer: str) -> None:
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.ReLU(inplace=True))
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), 1e-3)
    same = VirtualGradientDescent(model, 1e-3, operator=identity)
    svgd = SVGD(third, 1e-3)
    for _ in range(3):  # the later ones as remembered
        x = torch.randn(shape)
        for one, optimizer in ((twin, plain), (model, same), (third, svgd)):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
