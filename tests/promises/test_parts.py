"""Steps that reach a part of the model only: heads, skipped layers, frozen and thawed ones.

The twin skips in its graph what the model skips in its forward, and torch.optim.SGD leaves a
parameter without a gradient as it is.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD

BATCH = 6


class Heads(nn.Module):
    """One body with a head for each task; a step runs some heads and asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.heads = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 2)})

    def forward(self, x: Tensor, tasks: str) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {task: self.heads[task](hidden) for task in tasks}


class StochasticDepth(nn.Module):
    """Residual layers, each left out now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, kept: list[bool]) -> Tensor:
        for layer, is_kept in zip(self.layers, kept, strict=True):
            x = x + torch.tanh(layer(x)) if is_kept else x
        return self.head(x)


def test_a_loss_that_leaves_layers_out() -> None:
    """Whether forward skips them, or runs them and the loss does not ask."""
    torch.manual_seed(0)
    model = Heads().double()
    start, twin = copy.deepcopy(model), Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE)
    for step, task in enumerate("abbabaab"):
        x, y = torch.randn(BATCH, 4).double(), torch.randint(0, 2, (BATCH,))
        run = "ab" if step % 2 else task
        losses = [F.cross_entropy(m(x, run)[task], y) for m in (model, twin.model)]
        other = "b" if task == "a" else "a"
        before = model.heads[other].weight.clone()
        optimizer.zero_grad()
        losses[0].backward()
        optimizer.step()
        assert torch.equal(before, model.heads[other].weight)
        twin.backward(losses[1], BATCH)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)


def test_stochastic_depth() -> None:
    torch.manual_seed(0)
    model = StochasticDepth().double()
    start, twin = copy.deepcopy(model), Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE)
    for step in range(8):
        kept = (torch.rand(5) < 0.5).tolist() if step else [False] * 5
        x, y = torch.randn(BATCH, 4).double(), torch.randint(0, 3, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x, kept), y).backward()
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x, kept), y), BATCH)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)
    assert len(optimizer.operator.state) == 6  # one r for each layer, whichever steps it ran in


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_frozen_layers_stay_and_thawed_ones_train(weight_decay: float) -> None:
    """Gradual unfreezing, from the head down; then the head is frozen again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model.requires_grad_(False)
    twin = Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE, weight_decay=weight_decay)
    for trained in [{3}, {2, 3}, {1, 2, 3}, {0, 1, 2, 3}, {0, 1}, {1, 3}]:
        for m in (model, twin.model):
            for index, layer in enumerate(m):
                layer.requires_grad_(index in trained)
        for _ in range(2):
            before = copy.deepcopy(model)
            x = torch.randn(BATCH, 4).double()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            twin.backward(twin.model(x).square().mean(), BATCH)
            with torch.no_grad():
                for parameter in twin.model.parameters():
                    if parameter.grad is not None:
                        parameter.mul_(1 - LR * weight_decay)
            twin.optimizer.step()
            for index, (layer, old) in enumerate(zip(model, before, strict=True)):
                assert torch.equal(layer.weight, old.weight) == (index not in trained)
    assert_trained_alike(model, twin.model)


def test_gradients_left_from_before_a_freeze_are_not_applied_again() -> None:
    """As in torch.optim: a layer that is frozen stays if its gradient was cleared."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    optimizer = SVGD(model, LR, momentum=0.9)
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        before = model[0].weight.clone()
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4).double()).square().mean().backward()
        optimizer.step()
        assert torch.equal(before, model[0].weight) == frozen
