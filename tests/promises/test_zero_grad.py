"""Gradients may be cleared in any place of the loop, by anyone, in any way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD

Data = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data() -> Data:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(4)
    ]


def first_in_the_loop(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def after_the_step(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def between_forward_and_backward(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def to_zeros(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def by_the_model(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def by_the_model_to_zeros(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def by_hand(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def more_than_once(model: nn.Module, optimizer: SVGD) -> None:
    for x, y in data():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


PLACES = [
    after_the_step,
    between_forward_and_backward,
    to_zeros,
    by_the_model,
    by_the_model_to_zeros,
    by_hand,
    more_than_once,
]


@pytest.mark.parametrize("loop", PLACES)
def test_place(loop: Callable[[nn.Module, SVGD], None]) -> None:
    model, reference = network(), network()
    optimizer, usual = SVGD(model, 0.1, momentum=0.9), SVGD(reference, 0.1, momentum=0.9)
    loop(model, optimizer)
    first_in_the_loop(reference, usual)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    assert optimizer.operator.state.keys() == usual.operator.state.keys()
    for key, state in usual.operator.state.items():
        assert torch.equal(optimizer.operator.state[key]["r"], state["r"])


def give_up_by_optimizer(model: nn.Module, optimizer: SVGD) -> None:
    optimizer.zero_grad()


def give_up_by_optimizer_to_zeros(model: nn.Module, optimizer: SVGD) -> None:
    optimizer.zero_grad(set_to_none=False)


def give_up_by_model(model: nn.Module, optimizer: SVGD) -> None:
    model.zero_grad()


def give_up_by_model_to_zeros(model: nn.Module, optimizer: SVGD) -> None:
    """Seen on the CPU alone: nobody is told, and to look at a GPU's values is to wait for it."""
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    "give_up",
    [
        give_up_by_optimizer,
        give_up_by_optimizer_to_zeros,
        give_up_by_model,
        give_up_by_model_to_zeros,
    ],
)
def test_a_batch_that_was_given_up_leaves_no_trace_in_r(
    give_up: Callable[[nn.Module, SVGD], None],
) -> None:
    model, reference = network(), network()
    optimizer, undisturbed = SVGD(model, 0.1), SVGD(reference, 0.1)
    x, y = data()[0]
    (1000 * F.cross_entropy(model(2 * x), y)).backward()
    give_up(model, optimizer)
    for m, o in ((model, optimizer), (reference, undisturbed)):
        F.cross_entropy(m(x), y).backward()
        o.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
