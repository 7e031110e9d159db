"""Parameter groups: layer-wise rates, decay for some, and layers that come later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD
from virtualgrad.errors import ModelError

BATCH, DECAY = 6, 0.1


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def layer_wise(model: nn.Sequential) -> list[dict[str, Any]]:
    """The rate halves from layer to layer, counted from the head."""
    layers = [layer for layer in model if any(True for _ in layer.parameters())]
    return [
        {"params": list(layer.parameters()), "lr": LR * 0.5**depth}
        for depth, layer in enumerate(reversed(layers))
    ]


def step(model: nn.Module, optimizer: SVGD, twin: Twin) -> None:
    x = torch.randn(BATCH, 4).double()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    twin.backward(twin.model(x).square().mean(), BATCH)
    twin.optimizer.step()


def test_layer_wise_rates() -> None:
    model = network()
    start, twin = copy.deepcopy(model), Twin(model, groups=layer_wise)
    optimizer = SVGD(model, LR, scale=SCALE, params=layer_wise(model))
    for _ in range(5):
        step(model, optimizer, twin)
    assert_trained_alike(model, twin.model, start)
    one_rate = network()
    same = SVGD(one_rate, LR, scale=SCALE)
    one_rate(torch.randn(BATCH, 4).double()).square().mean().backward()
    same.step()
    assert not torch.allclose(one_rate[0].weight, model[0].weight)  # the groups matter


def test_decay_for_weights_but_not_for_biases_and_norms() -> None:
    """Weight and bias of a layer are then in two groups, each with an r: the same numbers."""
    model = network()
    start, twin = copy.deepcopy(model), Twin(model)

    def decayed(m: nn.Module) -> list[nn.Parameter]:
        return [p for p in m.parameters() if p.dim() > 1]

    groups = [
        {"params": decayed(model), "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    optimizer = SVGD(model, LR, scale=SCALE, params=groups)
    for _ in range(5):
        x = torch.randn(BATCH, 4).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        twin.backward(twin.model(x).square().mean(), BATCH)
        with torch.no_grad():
            for parameter in decayed(twin.model):
                parameter.mul_(1 - LR * DECAY)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)


def test_a_layer_that_comes_later() -> None:
    """``add_param_group``, as in torch.optim; r of the other layers goes on."""
    model = network()
    twin = Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE)
    for _ in range(3):
        step(model, optimizer, twin)
    late = nn.Linear(3, 3).double()
    start = copy.deepcopy(late)
    model.append(late)
    twin.model.append(copy.deepcopy(late))
    optimizer.add_param_group({"params": late.parameters(), "lr": LR / 10})
    twin.optimizer.add_param_group({"params": twin.model[5].parameters(), "lr": LR / 10})
    for _ in range(3):
        step(model, optimizer, twin)
    assert_trained_alike(model, twin.model)
    assert_trained_alike(late, twin.model[5], start)


@pytest.mark.parametrize("classes", [2, 3], ids=["another shape", "the same shape"])
def test_a_layer_that_takes_anothers_place(classes: int) -> None:
    """A new head: its r begins anew, though the old head's had its name."""
    model = network()
    twin = Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE, params=model[:4].parameters())
    optimizer.add_param_group({"params": model[4].parameters()})
    for _ in range(3):
        step(model, optimizer, twin)
    head = nn.Linear(5, classes).double()
    model[4] = head
    twin.model[4] = copy.deepcopy(head)
    kept = twin.rms.state
    del kept["addmm(4.bias, 4.weight)"]
    twin.rms.state = kept
    optimizer.add_param_group({"params": head.parameters()})
    twin.optimizer.add_param_group({"params": twin.model[4].parameters()})
    for _ in range(3):
        step(model, optimizer, twin)
    assert_trained_alike(model, twin.model)


@pytest.mark.parametrize("first", [True, False], ids=["empty first", "empty last"])
def test_an_empty_group_is_as_none(first: bool) -> None:
    """As in torch.optim.SGD: a split into decayed and other parameters may leave one side empty."""
    model, plain = network(), network()
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}, {"params": []}]
    optimizer = SVGD(model, LR, scale=SCALE, params=groups[::-1] if first else groups)
    reference = SVGD(plain, LR, scale=SCALE)
    for part, its in ((model, optimizer), (plain, reference)):
        torch.manual_seed(1)
        train(part, its, 3)
    again = network()
    again.load_state_dict(model.state_dict())
    groups = [{"params": list(again.parameters())}, {"params": []}]
    resumed = SVGD(again, 1.0, params=groups[::-1] if first else groups)
    resumed.load_state_dict(optimizer.state_dict())
    for part, its in ((model, optimizer), (plain, reference), (again, resumed)):
        torch.manual_seed(2)
        train(part, its, 3)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(again.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_group_may_come_empty_later() -> None:
    model = network()
    optimizer = SVGD(model, LR)
    optimizer.add_param_group({"params": []})
    train(model, optimizer, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_groups_that_are_all_empty_are_refused(count: int) -> None:
    with pytest.raises(ModelError, match="no parameter in any group"):
        SVGD(network(), LR, params=[{"params": []} for _ in range(count)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4).double()).square().mean().backward()
        optimizer.step()


def scaled(model: nn.Sequential) -> list[dict[str, Any]]:
    """A group for each layer, every one with its own s and rho."""
    layers = [layer for layer in model if any(True for _ in layer.parameters())]
    return [
        {"params": list(layer.parameters()), "scale": SCALE * 2**depth, "rho": 0.5 + depth / 10}
        for depth, layer in enumerate(layers)
    ]


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("when", ["before backward", "between steps"])
def test_groups_in_another_order(when: str, stale: bool) -> None:
    """The order of ``param_groups`` says nothing: each group keeps its numbers."""
    model, plain = network(), network()
    optimizer = SVGD(model, LR, eps=0.1, params=scaled(model), stale=stale)
    reference = SVGD(plain, LR, eps=0.1, params=scaled(plain), stale=stale)
    for number in range(4):
        x = torch.randn(BATCH, 4).double()
        groups = optimizer.param_groups
        if number == 2 and when == "between steps":
            groups[1], groups[2] = groups[2], groups[1]
        for part, its in ((model, optimizer), (plain, reference)):
            its.zero_grad()
            loss = part(x).square().mean()
            if number == 2 and part is model and when == "before backward":
                groups[1], groups[2] = groups[2], groups[1]
            loss.backward()
            its.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_groups_in_another_order_are_saved_and_loaded_so() -> None:
    model, plain = network(), network()
    optimizer = SVGD(model, LR, params=scaled(model))
    reference = SVGD(plain, LR, params=scaled(plain))
    for part, its in ((model, optimizer), (plain, reference)):
        torch.manual_seed(1)
        train(part, its, 2)
    optimizer.param_groups.reverse()
    state = copy.deepcopy(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["scale"] = 7.0
    optimizer.load_state_dict(state)  # makes new groups
    for part, its in ((model, optimizer), (plain, reference)):
        torch.manual_seed(2)
        train(part, its, 2)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_new_dicts_in_place_of_the_groups() -> None:
    """Some tools copy the groups: the numbers in the copies are those that count."""
    model, plain = network(), network()
    optimizer = SVGD(model, LR, params=scaled(model))
    optimizer.param_groups = [{**group, "scale": SCALE} for group in optimizer.param_groups[::-1]]
    groups = [{**group, "scale": SCALE} for group in scaled(plain)]
    reference = SVGD(plain, LR, params=groups)
    for part, its in ((model, optimizer), (plain, reference)):
        torch.manual_seed(1)
        train(part, its, 2)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_group_that_was_taken_out_is_not_trained() -> None:
    """As with torch.optim.SGD: its parameters stay as they are, the others go on as before."""
    model, plain = network(), network()
    optimizer = SVGD(model, LR, params=scaled(model))
    reference = SVGD(plain, LR, params=scaled(plain))
    train(model, optimizer, 1)
    plain.load_state_dict(model.state_dict())
    reference.load_state_dict(optimizer.state_dict())
    optimizer.param_groups.pop(0)
    reference.param_groups[0]["lr"] = 0.0
    for part, its in ((model, optimizer), (plain, reference)):
        torch.manual_seed(2)
        train(part, its, 3)
        assert its.state_dict()["state"]
        part.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    entries = [key for kept in optimizer.state_dict()["state"].values() for key in kept]
    assert not any("@0:linear" in entry for entry in entries)
    assert any("@4:linear" in entry for entry in entries)
