"""What compiled passes run, run without a compiler: the virtual gradients of eager passes.

Told that it is being traced, our side of a pass takes the ways that are made for compilers, as
plain Python: errors in them have a line, and a debugger can stop there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ops_in_torch
import pytest
import torch
from pretending import pretend_to_compile
from torch import Tensor, nn

from virtualgrad import SVGD, weights_only

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "features": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
        (5,),
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
        (4, 5),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3),
            nn.GroupNorm(2, 4),
        ).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        (3, 6, 6),
    ),
}
READINGS: list[dict[str, Any]] = [
    {},
    {"stale": True},
    {"share_positions": True},
    {"share_positions": True, "stale": True},
    {"per_sample": False},
    {"per_sample": False, "stale": True, "where": weights_only},
]


def trained(model: nn.Module, sample: tuple[int, ...], reading: dict[str, Any]) -> list[Tensor]:
    """Gradients and r of three steps, the second of two micro-batches."""
    torch.manual_seed(1)
    optimizer = SVGD(model, 1e-2, **reading)
    found: list[Tensor] = []
    for passes in (1, 2, 1):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(6, *sample, dtype=torch.float64)
            model(x).pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    state = optimizer.operator.state  # type: ignore[attr-defined]
    return found + [state[key]["r"] for key in sorted(state)]


@pytest.mark.parametrize("with_ops", [False, True])
@pytest.mark.parametrize("reading", READINGS, ids=" ".join)
@pytest.mark.parametrize("network", NETWORKS)
def test_untraced(
    network: str, reading: dict[str, Any], with_ops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, sample = NETWORKS[network]
    torch.manual_seed(0)
    model = make().double()
    expected = trained(copy.deepcopy(model), sample, reading)
    if with_ops:
        ops_in_torch.use(monkeypatch)
    pretend_to_compile(monkeypatch)
    found = trained(model, sample, reading)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)
