"""Several backward calls through one graph with checkpoints in it: as without checkpoints.

A reentrant one makes its sites anew in each backward pass: they are the same uses once more.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD

BATCH, WIDTH = 5, 4

pytestmark = pytest.mark.usefixtures("double_precision")

Run = Callable[..., Tensor]
RUNS: dict[str, Run] = {
    "reentrant": lambda function, *args: checkpoint(function, *args, use_reentrant=True),
    "non-reentrant": lambda function, *args: checkpoint(function, *args, use_reentrant=False),
}


class Model(nn.Module):
    """A block that is used twice, a method, one checkpoint in another, a parameter as argument."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first, self.run = nn.Linear(WIDTH, WIDTH), run
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.given = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.block, self.first(x))
        x = self.run(torch.matmul, x, self.given)
        return self.run(self.block, self.run(self.method, x))

    def method(self, x: Tensor) -> Tensor:
        return torch.tanh(self.run(self.block, x) @ self.matrix)


def in_two_passes(y: Tensor) -> None:
    (y - 1).square().mean().backward(retain_graph=True)
    y.pow(4).mean().backward()


def in_three_passes(y: Tensor) -> None:
    for weight in (1.0, -2.0):
        (weight * (y - weight)[1:].square().mean()).backward(retain_graph=True)
    y[:3].pow(4).mean().backward(retain_graph=True)


BACKWARD = [in_two_passes, in_three_passes]
READINGS: list[dict[str, Any]] = [{}, {"stale": True}, {"share_positions": True}]


def trained(run: Run, backward: Callable[[Tensor], None], **reading: Any) -> tuple[Any, set[str]]:
    torch.manual_seed(0)
    model = Model(run)
    optimizer = SVGD(model, 0.01, scale=0.1, **reading)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(torch.randn(BATCH, WIDTH)))
        optimizer.step()
    state = optimizer.state_dict()["state"].values()
    return dict(model.named_parameters()), {key for each in state for key in each}


@pytest.mark.parametrize("reading", READINGS, ids=str)
@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("run", RUNS)
def test_as_without_checkpoints(
    run: str, backward: Callable[[Tensor], None], reading: dict[str, Any]
) -> None:
    found, keys = trained(RUNS[run], backward, **reading)
    expected, expected_keys = trained(lambda function, *args: function(*args), backward, **reading)
    assert keys == expected_keys
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-9, atol=1e-12, msg=name)


def test_two_calls_are_two_uses() -> None:
    """Each with a graph of its own, be they run again in two backward passes or in one."""
    torch.manual_seed(0)
    model = Model(RUNS["reentrant"])
    optimizer = SVGD(model, 0.01)
    first, second = (model(torch.randn(BATCH, WIDTH)) for _ in range(2))
    in_two_passes(first)
    in_two_passes(second)
    optimizer.step()
    keys = {key for each in optimizer.state_dict()["state"].values() for key in each}
    assert sum(key.startswith("r@block.0:") for key in keys) == 6


def test_the_graph_is_freed() -> None:
    model = Model(RUNS["reentrant"])
    optimizer = SVGD(model, 0.01)
    y = model(torch.randn(BATCH, WIDTH))
    in_three_passes(y)
    node = weakref.ref(y.grad_fn)
    optimizer.step()
    del y
    gc.collect()
    assert node() is None
