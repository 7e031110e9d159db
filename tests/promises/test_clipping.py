"""Clipping by torch.nn.utils acts on virtual gradients as on any other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD

Clip = Callable[[Iterable[Tensor]], object]

CLIPS: dict[str, Clip] = {
    "by norm": lambda parameters: clip_grad_norm_(parameters, 0.5),
    "by largest element": lambda parameters: clip_grad_norm_(parameters, 0.1, norm_type=torch.inf),
    "by value": lambda parameters: clip_grad_value_(parameters, 0.02),
    "one by one": lambda parameters: [clip_grad_norm_(p, 0.1) for p in parameters],
    "by norm, foreach": lambda parameters: clip_grad_norm_(parameters, 0.5, foreach=True),
    "by norm, one op each": lambda parameters: clip_grad_norm_(parameters, 0.5, foreach=False),
    "by value, foreach": lambda parameters: clip_grad_value_(parameters, 0.02, foreach=True),
    "by value, one op each": lambda parameters: clip_grad_value_(parameters, 0.02, foreach=False),
    "in two parts": lambda parameters: clip_in_two_parts(list(parameters)),
}


def clip_in_two_parts(parameters: list[Tensor]) -> None:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    clip_grads_with_norm_(parameters, 0.5, norm)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)).double()


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(clip: str) -> None:
    model = network()
    start, twin = copy.deepcopy(model), Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE)
    for _ in range(5):
        x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 4, (6,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters()]
        CLIPS[clip](model.parameters())
        # It bites, or equality below would say nothing about clipping.
        assert any(
            not torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True)
        )
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x), y), batch_size=6)
        CLIPS[clip](twin.model.parameters())
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)


def test_clipping_leaves_r_alone() -> None:
    """R is of the gradient that arrived: clipping comes behind T."""
    clipped, free = network(), network()
    optimizers = [SVGD(clipped, LR), SVGD(free, LR)]
    x, y = torch.randn(6, 2, 5, 5).double(), torch.randint(0, 4, (6,))
    for model, optimizer in zip((clipped, free), optimizers, strict=True):
        F.cross_entropy(model(x), y).backward()
        if model is clipped:
            clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    first, second = (optimizer.operator.state for optimizer in optimizers)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key]["r"], second[key]["r"]) for key in first)
    assert not torch.allclose(clipped[0].weight, free[0].weight)
