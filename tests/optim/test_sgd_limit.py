"""The limit case: with T = identity the optimizer is torch.optim.SGD, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD, VirtualGradientDescent
from virtualgrad.lab.networks import MLP, VGG, ResNet20


def same_bits(model: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], steps: int
) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("network", "shape", "steps"),
    [(MLP, (16, 784), 50), (VGG, (4, 3, 32, 32), 50), (ResNet20, (2, 3, 32, 32), 50)],
)
def test_identity_equals_sgd_bit_for_bit(
    network: type[nn.Module], shape: tuple[int, ...], steps: int, momentum: float
) -> None:
    torch.manual_seed(0)
    model = network()
    other = copy.deepcopy(model)
    train(model, VirtualGradientDescent(model, 0.05, momentum=momentum), shape, steps)
    train(other, torch.optim.SGD(other.parameters(), 0.05, momentum=momentum), shape, steps)
    assert same_bits(model, other)


def test_svgd_that_leaves_every_site_out_equals_sgd_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = MLP()
    other = copy.deepcopy(model)
    train(model, SVGD(model, 0.05, where=lambda site: False, momentum=0.9), (16, 784), 20)
    train(other, torch.optim.SGD(other.parameters(), 0.05, momentum=0.9), (16, 784), 20)
    assert same_bits(model, other)


def test_decoupled_weight_decay_by_its_formula() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = VirtualGradientDescent(layer, 0.1, weight_decay=0.5, momentum=0.9)
    x = torch.randn(4, 3).double()
    buffers = [torch.zeros_like(p) for p in before]
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        optimizer.step()
        buffers = [0.9 * b + g for b, g in zip(buffers, grads, strict=True)]
        before = [(1 - 0.1 * 0.5) * p - 0.1 * b for p, b in zip(before, buffers, strict=True)]
    for p, expected in zip(layer.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-15)
