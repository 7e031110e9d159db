"""A linear op whose bias is broadcast over its channels, which no nn.Linear has: eager as compiled.

What eager passes do is held to the second encapsulation elsewhere (``tests/cases.py``).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD

READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "stale": {"stale": True},
    "shared": {"share_positions": True},
    "shared, stale": {"share_positions": True, "stale": True},
}


class Layer(nn.Module):
    """Weight and bias of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("shape", [(4,), (1,), (), (1, 4)], ids=str)
def test_compiled_as_eager(shape: tuple[int, ...], reading: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Layer(shape)
    model = copy.deepcopy(eager)
    theirs, ours = (SVGD(one, 1e-6, **READINGS[reading]) for one in (eager, model))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(3, 2, 5, dtype=torch.float64)
        for one, optimizer in ((eager, theirs), (run, ours)):
            optimizer.zero_grad()
            one(x).pow(3).mean().backward()
            optimizer.step()
        for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
            assert found.grad is not None
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-10, atol=1e-12)
