"""Images that are laid out channels-last have the virtual gradients of contiguous ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 6, 3),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),  # torch alone dies of it, on a CPU
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer norm": lambda: nn.LayerNorm([4, 5, 5]),
    "PReLU": lambda: nn.PReLU(4),
}
READINGS: list[dict[str, Any]] = [{}, {"stale": True}, {"share_positions": True}]


def gradients(model: nn.Module, x: Tensor, reading: dict[str, Any]) -> list[Tensor]:
    with SVGD(model, 1e-2, **reading):
        model(x).pow(3).mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reading", READINGS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_channels_last(layer: str, reading: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    model = nn.Sequential(first, LAYERS[layer](), nn.Tanh()).double()
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    expected = gradients(model, x, reading)
    found = gradients(other, x.to(memory_format=torch.channels_last), reading)
    assert len(found) == len(list(model.parameters()))
    for one, its in zip(found, expected, strict=True):
        torch.testing.assert_close(one, its, rtol=1e-10, atol=1e-14)
