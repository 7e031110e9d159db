"""A small network, trained compiled and eagerly, to be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad import SVGD

READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "released": {"per_sample": False, "stale": True},
    "shared": {"share_positions": True, "stale": True},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)
    ).double()


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 6, 6, generator=generator).double() for n in sizes]


def train(
    run: Callable[[Tensor], Tensor],
    optimizer: SVGD,
    inputs: list[Tensor],
    after: Callable[[int], None] = lambda step: None,
) -> None:
    for step, x in enumerate(inputs):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()
        after(step)


def assert_same(first: nn.Module, second: nn.Module, rtol: float = 1e-10) -> None:
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert (p - q).norm() <= rtol * p.norm(), name


def assert_same_state(ours: SVGD, theirs: SVGD) -> None:
    assert ours.operator.state.keys() == theirs.operator.state.keys()
    for key, state in theirs.operator.state.items():
        torch.testing.assert_close(ours.operator.state[key]["r"], state["r"], rtol=1e-10, atol=0)
