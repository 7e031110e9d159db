"""Promise 3: several backward calls before one step, ``retain_graph`` or not.

Autograd adds up what they bring. The oracle is one backward call for the sum of the losses. Calls
for micro-batches, each with a graph of its own, are in ``test_accumulation``; calls through one
compiled graph in ``test_retained_graphs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import (
    BATCH,
    STEPS,
    Heads,
    at_once,
    batches,
    one_after_the_other,
    one_after_the_other_on_ranks,
    r_of,
    retained,
    summed,
)
from processes import run_ranks
from torch import Tensor
from twin import LR, RHO, SCALE

from virtualgrad import SVGD, weights_only

Backward = Callable[[Tensor, Tensor], None]

READINGS: dict[str, dict[str, Any]] = {
    "per sample": {},
    "per batch": {"per_sample": False},
    "weights only": {"where": weights_only},
}


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
    return model, r_of(optimizer)


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


@pytest.mark.parametrize("stale", [True, False], ids=["r of before", "r updated first"])
def test_passes_through_one_graph_are_one_at_sites_that_were_compiled(stale: bool) -> None:
    """What compiled passes keep is kept otherwise: an eager pass after one has to add to that."""
    found = []
    for compiled_first in (True, False):
        model, (first, second) = Heads(), batches(2)
        optimizer = SVGD(model, LR, scale=SCALE, stale=stale)
        run = torch.compile(model, backend="aot_eager") if compiled_first else model
        summed(*run(first))
        optimizer.step()
        optimizer.zero_grad()
        one_after_the_other(*model(second))
        optimizer.step()
        found.append({**r_of(optimizer), **model.state_dict()})
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_passes_through_one_graph_on_several_ranks_are_one() -> None:
    """The graph of each rank: r is that of one process, which goes twice through a larger one."""
    for options in ({"stale": True}, {}):
        expected = one_after_the_other_on_ranks(0, 1, options)
        for found in run_ranks(2, one_after_the_other_on_ranks, options):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
