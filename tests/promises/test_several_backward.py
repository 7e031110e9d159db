"""Promise 3: several backward calls before one step, ``retain_graph`` or not.

Autograd adds up what they bring. The oracle is one backward call for the sum of the losses. Calls
for micro-batches, each with a graph of its own, are in ``test_accumulation``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import LR, RHO, SCALE

from virtualgrad import SVGD, weights_only

BATCH, STEPS = 6, 4

Backward = Callable[[Tensor, Tensor], None]

READINGS: dict[str, dict[str, Any]] = {
    "per sample": {},
    "per batch": {"per_sample": False},
    "weights only": {"where": weights_only},
}


class Heads(nn.Module):
    """A body under two heads, whose losses meet in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)
        self.double()

    def losses(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Of what the body has made."""
        hidden = torch.tanh(sigma)
        return self.a(hidden).cos().mean(), F.softplus(self.b(hidden)).mean()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.losses(self.body(x))


def summed(first: Tensor, second: Tensor) -> None:
    (first + second).backward()


def at_once(first: Tensor, second: Tensor) -> None:
    torch.autograd.backward([first, second])


def retained(first: Tensor, second: Tensor) -> None:
    (first + second).backward(retain_graph=True)


def one_after_the_other(first: Tensor, second: Tensor) -> None:
    first.backward(retain_graph=True)
    second.backward()


def batches(count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 4, generator=generator).double() for _ in range(count)]


def train(
    backward: Backward, stale: bool, steps: int = STEPS, **reading: Any
) -> tuple[Heads, dict[str, Tensor]]:
    """The model with its last gradients, and r."""
    model = Heads()
    optimizer = SVGD(model, LR, scale=SCALE, stale=stale, **reading)
    for x in batches(steps):
        optimizer.zero_grad()
        backward(*model(x))
        optimizer.step()
    return model, {key: state["r"] for key, state in optimizer.operator.state.items()}


@pytest.mark.parametrize("stale", [True, False], ids=["r of before", "r updated first"])
@pytest.mark.parametrize("backward", [at_once, retained])
def test_one_pass_for_all_losses(backward: Backward, stale: bool) -> None:
    found, expected = train(backward, stale), train(summed, stale)
    for p, q in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("reading", READINGS)
def test_passes_through_one_graph_are_one(reading: str) -> None:
    """With the r of before the step: gradients and r are those of the summed loss."""
    found, expected = (
        train(backward, stale=True, **READINGS[reading])
        for backward in (one_after_the_other, summed)
    )
    for p, q in zip(found[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=0)


def test_r_updated_first_is_that_of_the_summed_loss_but_t_goes_by_what_it_knows() -> None:
    """Of one step: the first of two passes cannot know what the second brings."""
    found, expected = (
        train(backward, stale=False, steps=1) for backward in (one_after_the_other, summed)
    )
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=0)
    assert not torch.allclose(found[0].body.weight, expected[0].body.weight, rtol=1e-6)


def test_a_graph_that_outlives_a_step_begins_anew() -> None:
    """A second pass after step() belongs to the next step, and counts its samples there."""
    model, (x,) = Heads(), batches(1)
    optimizer = SVGD(model, LR, scale=SCALE, stale=True)
    first, second = model(x)
    first.backward(retain_graph=True)
    optimizer.step()
    r = optimizer.operator.state["body:linear(weight)"]["r"].clone()
    sigma = model.body(x).detach()
    optimizer.zero_grad()
    model = Heads()  # its values at the time of the graph
    sigma = model.body(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model.losses(sigma)[1], sigma)
    second.backward()
    optimizer.step()
    expected = RHO * r + (1 - RHO) * (BATCH * g).square().mean(0)
    found = optimizer.operator.state["body:linear(weight)"]["r"]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_passes_through_one_compiled_graph_count_its_samples_each_time() -> None:
    """Pinned, not promised: no host is there to keep a g, so they are taken for micro-batches."""
    model, (x,) = Heads(), batches(1)
    sigma = model.body(x).detach().requires_grad_()
    first, second = (torch.autograd.grad(model.losses(sigma)[i], sigma)[0] for i in range(2))
    optimizer = SVGD(model, LR, stale=True)
    one_after_the_other(*torch.compile(model, backend="aot_eager", fullgraph=True)(x))
    optimizer.step()
    as_of_two = (2 * BATCH * torch.cat([first, second])).square().mean(0)
    r = optimizer.operator.state["body:linear(weight)"]["r"]
    torch.testing.assert_close(r, (1 - RHO) * as_of_two, rtol=1e-10, atol=0)
