"""A state_dict knows with which switches its r was made: another unit or shape of r is refused."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from virtualgrad import SVGD, VirtualGradientDescent, operators, weights_only
from virtualgrad.errors import ShapeChangedError, StateDictError
from virtualgrad.optim import expect_state
from virtualgrad.sites import Site

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

RELEASED: dict[str, Any] = {"per_sample": False, "stale": True, "where": weights_only}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(15, 4)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 2, 5, generator=generator).double()).square().mean().backward()
        optimizer.step()


def trained(**options: Any) -> tuple[nn.Module, SVGD]:
    model = network()
    optimizer = SVGD(model, 0.1, scale=0.02, **options)
    train(model, optimizer)
    return model, optimizer


def saved_by(**options: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(trained(**options)[1].state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def as_before_switches(state: dict[str, Any]) -> dict[str, Any]:
    """What a version that did not save them would have written."""
    old = copy.deepcopy(state)
    for entries in old["state"].values():
        for entry in [entry for entry in entries if entry.startswith("made_with@")]:
            del entries[entry]
    return old


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        (RELEASED, {}, r"per_sample=False; .*per_sample=True.*per_sample=False"),
        ({}, {"per_sample": False}, "per_sample=True; .*per_sample=False"),
        ({"loss_reduction": "sum"}, {}, "loss_reduction=sum; .*loss_reduction=mean"),
        ({}, {"share_positions": True}, "share_positions=False; .*share_positions=True"),
    ],
    ids=["released", "per batch", "sum", "shared"],
)
def test_another_meaning_of_r_is_refused(there: Any, here: Any, message: str) -> None:
    state = saved_by(**there)
    model, optimizer = trained(**here)
    parameters, before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateDictError, match=message):
        optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), parameters, rtol=0, atol=0)
    train(model, optimizer)


@pytest.mark.parametrize("options", [{}, RELEASED, {"share_positions": True}])
def test_the_same_switches_go_on_bit_by_bit(options: Any) -> None:
    model, optimizer = trained(**options)
    other = copy.deepcopy(model)
    again = SVGD(other, 0.5, **options)
    again.load_state_dict(saved_by(**options))
    train(model, optimizer)
    train(other, again)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_state_of_before_there_were_switches_loads() -> None:
    model, optimizer = trained(**RELEASED)
    state = optimizer.state_dict()
    assert as_before_switches(state)["state"][0].keys() == {"r@0:conv1d(weight)"}
    fresh = SVGD(copy.deepcopy(model), 0.1)
    fresh.load_state_dict(as_before_switches(state))
    for key, entries in optimizer.operator.state.items():
        assert torch.equal(fresh.operator.state[key]["r"], entries["r"])


def test_another_order_is_a_warning_and_r_is_the_same() -> None:
    model, optimizer = trained()
    other = SVGD(copy.deepcopy(model), 0.1, stale=True)
    with pytest.warns(UserWarning, match="stale=False.*stale=True"):
        other.load_state_dict(optimizer.state_dict())
    for key, entries in optimizer.operator.state.items():
        assert torch.equal(other.operator.state[key]["r"], entries["r"])
    train(other.model, other)


def heads_only(site: Site) -> bool:
    return site.key.startswith("2:")


def test_other_sites_are_a_warning() -> None:
    model, optimizer = trained()
    other = SVGD(copy.deepcopy(model), 0.1, where=heads_only)
    with pytest.warns(UserWarning, match="where=every_linear_site.*where=heads_only"):
        other.load_state_dict(optimizer.state_dict())


def test_switches_of_a_composition() -> None:
    def make(model: nn.Module, **options: Any) -> VirtualGradientDescent:
        momentum = operators.on_sigma(operators.momentum, c=0.5)
        operator = operators.compose(momentum, operators.RMS(**options))
        return VirtualGradientDescent(model, 0.1, operator)

    model = network()
    optimizer = make(model)
    train(model, optimizer)
    with pytest.raises(StateDictError, match=r"1\.per_sample=True; .*1\.per_sample=False"):
        make(network(), per_sample=False).load_state_dict(optimizer.state_dict())
    make(network()).load_state_dict(optimizer.state_dict())


def test_share_positions_is_no_advice_where_it_is_on() -> None:
    """r of before there were switches, one number per position, comes to an r per channel."""
    optimizer = SVGD(network(), 0.1, share_positions=True)
    optimizer.load_state_dict(as_before_switches(saved_by()))
    with pytest.raises(ShapeChangedError, match="saved without") as caught:
        train(optimizer.model, optimizer)
    assert "pass share_positions=True" not in str(caught.value)


# -------------------------------------------------------------------- sharded checkpoints


def sharded(folder: Path, *, old: bool = False) -> list[Tensor]:
    """Save by torch.distributed.checkpoint; the parameters three steps later."""
    model, optimizer = trained(**RELEASED, momentum=0.5)
    model_state, state = get_state_dict(model, optimizer)
    state = as_before_switches(state) if old else state
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    train(model, optimizer)
    return list(model.parameters())


def load(folder: Path, optimizer: SVGD) -> None:
    expect_state(optimizer, dcp.FileSystemReader(folder).read_metadata())
    model_state, state = get_state_dict(optimizer.model, optimizer)
    both = {"model": model_state, "optimizer": state}
    dcp.load(both, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        optimizer.model,
        optimizer,
        model_state_dict=both["model"],
        optim_state_dict=both["optimizer"],
    )


@pytest.mark.parametrize("old", [False, True], ids=["with switches", "of before"])
def test_a_sharded_checkpoint_goes_on(old: bool, tmp_path: Path) -> None:
    expected = sharded(tmp_path, old=old)
    optimizer = SVGD(network(), 0.5, **RELEASED, momentum=0.5)
    load(tmp_path, optimizer)
    train(optimizer.model, optimizer)
    torch.testing.assert_close(list(optimizer.model.parameters()), expected, rtol=0, atol=0)
    assert any(
        entry.startswith("made_with@")
        for entries in optimizer.state_dict()["state"].values()
        for entry in entries
    )


def test_a_sharded_checkpoint_of_another_meaning_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    optimizer = SVGD(network(), 0.5, stale=True, where=weights_only, momentum=0.5)
    with pytest.raises(StateDictError, match=r"per_sample=False; .*per_sample=True"):
        load(tmp_path, optimizer)
    assert optimizer.operator.state == {}
