"""Tensors in pieces for foreach functions: every number once, and in place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import VirtualGradientDescent
from virtualgrad.operators import pieces
from virtualgrad.operators.pieces import PIECE, in_pieces


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_fill_too_little", lambda tensors: True)


def test_tensors_stay_whole_outside_of_captured_graphs() -> None:
    one, other = torch.zeros(3 * PIECE), torch.ones(3 * PIECE)
    assert in_pieces([one], [other]) == ([one], [other])
    assert in_pieces([], []) == ([], [])


def pair(kind: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (40, 30, 5, 4)
    if kind == "channels last":
        one, other = torch.randn(2, *shape).unbind()
        return tuple(t.contiguous(memory_format=torch.channels_last) for t in (one, other))
    if kind == "other order":
        return torch.randn(shape), torch.randn(shape).to(memory_format=torch.channels_last)
    if kind == "gaps":
        return torch.randn(40, 1200)[:, ::2], torch.randn(40, 1200)[:, ::2]
    if kind == "with an offset":
        return torch.randn(3 * PIECE + 7)[5:], torch.randn(3 * PIECE + 7)[5:]
    if kind == "expanded":
        return torch.randn(PIECE + 1), torch.randn(1).expand(PIECE + 1)
    return torch.randn(10), torch.randn(10)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("channels last", 3),
        ("with an offset", 4),
        ("other order", 1),
        ("gaps", 1),
        ("expanded", 1),
        ("short", 1),
    ],
)
def test_every_number_is_met_once_and_in_place(kind: str, count: int) -> None:
    target, source = pair(kind)
    expected = target + 2 * source
    targets, sources = in_pieces([target], [source])
    assert len(targets) == len(sources) == count
    torch._foreach_add_(targets, sources, alpha=2)
    assert torch.equal(target, expected)


@pytest.mark.usefixtures("wanted")
def test_a_step_in_pieces_is_that_of_sgd_to_the_last_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(20, 50, 3), nn.ReLU(), nn.Flatten(), nn.Linear(200, 70))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = copy.deepcopy(model)
    ours, theirs = VirtualGradientDescent(model, 0.1), torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(2):
        x = torch.randn(8, 20, 4, 4)
        for one, optimizer in ((model, ours), (other, theirs)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
