"""The statistics of all ranks travel while a step looks at its gradients.

One process stands for several: what the others add arrives when it is waited for, and until then
the buffer holds NaN, which nobody may read. That several processes then equal one is tested in
``tests/promises/test_ddp.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.amp import GradScaler

from virtualgrad import SVGD
from virtualgrad.errors import NonFiniteError
from virtualgrad.operators import RMS
from virtualgrad.operators.finite import FiniteCheck
from virtualgrad.operators.ranks import Ranks
from virtualgrad.optim import descent

Events = list[str]


class Travelling:
    """What an asynchronous reduction returns; the others bring the same, and more at the end."""

    def __init__(self, tensor: Tensor, events: Events, more: float) -> None:
        self.tensor, self.events = tensor, events
        self.sum = 2 * tensor
        self.sum[-1] += more
        tensor.fill_(float("nan"))

    def wait(self) -> None:
        self.events.append("wait")
        self.tensor.copy_(self.sum)


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, events: Events, tmp_path: Path) -> Iterator[list[Any]]:
    """How much more the other ranks bring than this one, reduction by reduction; or nothing."""
    more: list[float] = []

    def reduce(tensor: Tensor, *, group: Any, async_op: bool = False) -> Travelling:
        assert async_op, "the host waits here"
        events.append("begin")
        return Travelling(tensor, events, more.pop(0) if more else 0.0)

    def note(owner: Any, name: str, event: str) -> None:
        plain = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note(FiniteCheck, "add", "look")
    note(descent, "descend", "update")
    note(RMS, "commit", "commit")
    meeting = (tmp_path / "meeting").as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    monkeypatch.setattr(distributed, "all_reduce", reduce)
    try:
        yield more
    finally:
        distributed.destroy_process_group()


def trained(*, shared: bool, **options: Any) -> SVGD:
    """An optimizer whose ranks have agreed on their sites, after a first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = SVGD(model, 1e-2, per_sample=False, stale=True, **options)
    if shared:
        optimizer.operator.ranks = Ranks(distributed.group.WORLD, torch.device("cpu"))
    backward(optimizer)
    optimizer.step()
    return optimizer


def backward(optimizer: SVGD) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer.zero_grad()
    scaler = optimizer.grad_scaler
    loss = optimizer.model(torch.randn(5, 3, generator=generator).double()).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def kept(optimizer: SVGD) -> list[Tensor]:
    """Parameters and r."""
    running = [state["r"] for state in optimizer.operator.state.values()]
    return [t.detach().clone() for t in (*optimizer.model.parameters(), *running)]


def test_begun_before_a_step_looks_at_gradients_and_waited_for_before_it_writes(
    others: list[Any], events: Events
) -> None:
    optimizer = trained(shared=True)
    backward(optimizer)
    events.clear()
    optimizer.step()
    assert events == ["begin", "look", "wait", "look", "update", "commit"]


def test_under_a_scaler(others: list[Any], events: Events) -> None:
    """It is asked first whether the scaler has found an infinity, on any rank."""
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = trained(shared=True, grad_scaler=scaler)
    backward(optimizer)
    events.clear()
    scaler.step(optimizer)
    assert [event for event in events if event != "look"] == ["begin", "wait", "update", "commit"]


def test_what_arrives_counts(others: list[Any]) -> None:
    """Others with the same g and as many samples leave the mean of squares as it is."""
    together, alone = trained(shared=True), trained(shared=False)
    assert len(together.operator.state) == 2
    torch.testing.assert_close(kept(together), kept(alone), rtol=1e-12, atol=0)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_an_infinite_g_of_another_rank(others: list[Any], events: Events, nonfinite: str) -> None:
    """It is not in this rank's gradients, and still nothing is written."""
    optimizer = trained(shared=True, nonfinite=nonfinite)
    backward(optimizer)
    before = kept(optimizer)
    events.clear()
    others.append(float("inf"))
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError):
            optimizer.step()
    else:
        optimizer.step()
    assert events == ["begin", "look", "wait", "look"]
    torch.testing.assert_close(kept(optimizer), before, rtol=0, atol=0)


def test_a_step_that_was_interrupted_leaves_nothing_behind(
    others: list[Any], events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, undisturbed = trained(shared=True), trained(shared=True)
    backward(optimizer)
    with monkeypatch.context() as broken:
        broken.setattr(FiniteCheck, "add", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    for one in (optimizer, undisturbed):
        backward(one)
        one.step()
    torch.testing.assert_close(kept(optimizer), kept(undisturbed), rtol=0, atol=0)
