"""Steps that are captured as a graph and replayed, whatever is run between the replays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from captured import Graph, captured
from compiled_training import READINGS
from torch import Tensor, nn

from virtualgrad import SVGD


def step(run: Callable[[Tensor], Tensor], optimizer: SVGD, x: Tensor) -> None:
    optimizer.zero_grad()
    run(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("reading", READINGS)
def test_what_is_run_between_replays_is_forgotten(
    reading: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that no step follows leaves nothing behind in r, nor in the parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    model = nn.Sequential(*layers).double()
    other = copy.deepcopy(model)
    ours, theirs = (SVGD(one, 1e-4, **READINGS[reading]) for one in (model, other))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    x, noise = torch.randn(2, 6, 4, 5, dtype=torch.float64).unbind()
    for _ in range(3):  # all is at rest by then
        step(run, ours, x)
    graph = Graph()
    with captured(graph, monkeypatch):
        step(run, ours, x)
    for _ in range(2):
        run(noise).square().mean().backward()
        graph.replay()
    for _ in range(6):
        step(other, theirs, x)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    for key, state in theirs.operator.state.items():
        torch.testing.assert_close(ours.operator.state[key]["r"], state["r"], rtol=1e-10, atol=0)
