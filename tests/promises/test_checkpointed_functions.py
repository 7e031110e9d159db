"""Checkpoints of functions and methods: ops on parameters in them are watched as they run again.

The oracle is the same model without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, weights_only

BATCH, WIDTH, WORDS = 5, 4, 7

pytestmark = pytest.mark.usefixtures("double_precision")

Run = Callable[..., Tensor]


def plainly(function: Run, *args: Tensor) -> Tensor:
    return function(*args)


def reentrant(function: Run, *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrant(function: Run, *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False)


RUNS = {"reentrant": reentrant, "non-reentrant": not_reentrant}


class Model(nn.Module):
    """A module with parameters of its own beside a layer, of which a way has it run a part."""

    def __init__(self, way: str, run: Run) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.way, self.run = WAYS[way], run

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.words(x))
        for _ in range(2):
            x = self.way(self, x)
        return x

    def method(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) @ self.matrix) * self.gain

    def nested(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.run(self.method, x) @ self.matrix.t())


def scores_of(m: Model, x: Tensor) -> Tensor:
    scores = m.run(lambda h: F.linear(h, m.words.weight).softmax(-1), x)
    return scores @ m.words.weight + m.gain


def by_a_view(m: Model, x: Tensor) -> Tensor:
    transposed = m.matrix.t()
    return m.run(lambda h: torch.tanh(h @ transposed), x) * m.gain


WAYS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "method": lambda m, x: m.run(m.method, x),
    "nested": lambda m, x: m.run(m.nested, x),
    "tied weight": scores_of,
    "view from outside": by_a_view,
    "parameter given": lambda m, x: torch.tanh(m.run(F.linear, x, m.matrix, m.gain)),
    "view given": lambda m, x: torch.tanh(m.run(torch.matmul, x, m.matrix.mT)) + m.gain,
}
READINGS: list[dict[str, Any]] = [
    {},
    {"stale": True, "per_sample": False, "where": weights_only},
    {"share_positions": True, "momentum": 0.9},
]


def trained(way: str, run: Run, **reading: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model(way, run)
    optimizer = SVGD(model, 0.05, scale=0.3, **reading)
    for _ in range(3):  # the later ones by marks
        optimizer.zero_grad()
        (model(torch.randint(WORDS, (BATCH, 3))) - 1).square().mean().backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("reading", READINGS, ids=" ".join)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_functions_train_as_without(
    way: str, run: str, reading: dict[str, Any]
) -> None:
    found, expected = (trained(way, each, **reading) for each in (RUNS[run], plainly))
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-10, atol=1e-13, msg=name)
