"""The promises that a GPU may break: its random numbers, its streams, its collectives.

What runs here on a GPU runs on the CPU, too, so that the tests themselves are known to be right.
Half precision, compiled or not, is in ``test_half_precision``; steps captured as a CUDA graph are
in ``tests/lab/bench/test_gpu`` and ``tests/lab/test_engine``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import Network, alone, data
from devices import DEVICES
from on_a_device import several
from processes import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD

READINGS: list[dict[str, Any]] = [{}, {"per_sample": False, "stale": True}]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Float64; kernels of a GPU add in another order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value.cpu(), rtol=1e-9, atol=1e-11, msg=name)


class Blocks(nn.Module):
    """Blocks with dropout, under checkpoints or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first = nn.Linear(7, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", READINGS, ids=["algorithm 1", "released"])
def test_activation_checkpointing_repeats_the_dropout(options: dict[str, Any], device: str) -> None:
    def trained(reentrant: bool | None) -> dict[str, Tensor]:
        model = Blocks(reentrant).to(device)
        optimizer = SVGD(model, 1e-2, **options)
        torch.manual_seed(1)
        for x in data():
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()
        return model.state_dict() | {k: s["r"] for k, s in optimizer.operator.state.items()}

    expected = trained(None)
    assert_same(trained(False), expected)
    assert_same(trained(True), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_micro_batches_are_the_large_batch(device: str) -> None:
    options = {"per_sample": False, "stale": True}
    model = Network().to(device)
    optimizer = SVGD(model, 1e-2, **options)
    for x in data():
        optimizer.zero_grad()
        for part in x.to(device).split([3, 3, 2]):
            (model(part).square().mean(1).sum() / len(x)).backward()
        optimizer.step()
    assert_same(model.state_dict(), alone(options))


@pytest.mark.parametrize("device", DEVICES)
def test_data_parallel_over_the_backend_of_the_device(device: str) -> None:
    """One rank over NCCL: replicas and shards."""
    tasks = [(name, options) for name in ("over_own_backend", "sharded") for options in READINGS]
    (found,) = run_ranks(1, several, device, tasks)
    for (_, options), state in zip(tasks, found, strict=True):
        assert_same(state, alone(options))


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_that_share_a_device(device: str, tmp_path: Path) -> None:
    """Statistics of the ranks are reduced on the device; checkpoints come back to it."""
    tasks: list[tuple[str, Any]] = [("replicated", options) for options in READINGS]
    first, second = run_ranks(2, several, device, [*tasks, ("resumed", str(tmp_path))])
    for number, options in enumerate(READINGS):
        assert_same(first[number], alone(options))
        assert_same(second[number], alone(options))
    model = Network().to(device)
    optimizer = SVGD(model, 1e-2, stale=True, momentum=0.5)
    for x in data() + data():
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()
    assert_same(first[-1], model.state_dict())
    assert_same(second[-1], model.state_dict())
