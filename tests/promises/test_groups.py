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
