"""Several backward passes through one compiled graph: refused, never taken for micro-batches.

By itself torch lets a compiled graph be kept (``retain_graph=True``) if the first backward pass
ever made through it keeps it; once it was compiled to reuse what the forward pass has saved
(``donated_buffer``), it raises an error of its own. Here that is switched off, so that all of it is
left to us.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from heads import Heads, batches, one_after_the_other, r_of, retained, summed
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.amp import GradScaler
from twin import LR, SCALE

from virtualgrad import SVGD
from virtualgrad.errors import RetainedGraphError

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

READINGS: dict[str, dict[str, Any]] = {
    "r of before": {"stale": True},
    "r updated first": {},
    "per batch": {"stale": True, "per_sample": False},
}


@pytest.fixture(autouse=True)
def graphs_that_can_be_kept() -> Iterator[None]:
    torch._dynamo.reset()
    with functorch_config.patch(donated_buffer=False):
        yield


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **{"backend": "aot_eager", "fullgraph": True, **options})


def pair(options: dict[str, Any]) -> tuple[Heads, SVGD, Any]:
    model = Heads()
    return model, SVGD(model, LR, scale=SCALE, **options), compiled(model)


def everything(model: nn.Module, optimizer: SVGD) -> dict[str, Tensor]:
    return copy.deepcopy({**model.state_dict(), **r_of(optimizer)})


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reading", READINGS)
def test_a_second_pass_is_refused_and_leaves_no_trace(reading: str, backend: str) -> None:
    model, (first, second, third, _) = Heads(), batches()
    optimizer = SVGD(model, LR, scale=SCALE, **READINGS[reading])
    run = compiled(model, backend=backend)
    for x in (first, second):  # numbers of graphs begin again with each step
        optimizer.zero_grad()
        summed(*run(x))
        optimizer.step()
    before = everything(model, optimizer)
    optimizer.zero_grad()
    one_after_the_other(*run(third))
    with pytest.raises(RetainedGraphError, match=r"at body:linear\(weight\) and 2 more;.*once"):
        optimizer.step()
    torch.testing.assert_close(everything(model, optimizer), before, rtol=0, atol=0)
    twin = copy.deepcopy(model)  # which goes on as if nothing had been
    other = SVGD(twin, LR, scale=SCALE, **READINGS[reading])
    other.load_state_dict(optimizer.state_dict())
    for o, call in ((optimizer, run), (other, twin)):
        o.zero_grad()
        summed(*call(third))
        o.step()
    torch.testing.assert_close(
        everything(model, optimizer), everything(twin, other), rtol=1e-9, atol=1e-12
    )


def test_nobody_looks_where_nan_is_ignored() -> None:
    """As documented: what marks a second pass is a NaN in r, and spreads."""
    model = Heads()
    optimizer = SVGD(model, LR, scale=SCALE, nonfinite="ignore")
    one_after_the_other(*compiled(model)(batches()[0]))
    optimizer.step()
    assert any(kept["r"].isnan().any() for kept in optimizer.operator.state.values())


def test_it_is_refused_where_other_steps_are_skipped() -> None:
    """``nonfinite="skip"`` and a GradScaler skip a step whose gradients are not finite."""
    for options in ({}, {"stale": True}):
        scaler = GradScaler("cpu", init_scale=4.0)
        model = Heads()
        optimizer = SVGD(model, LR, scale=SCALE, nonfinite="skip", grad_scaler=scaler, **options)
        first, second = compiled(model)(batches(1)[0])
        one_after_the_other(scaler.scale(first), scaler.scale(second))
        with pytest.raises(RetainedGraphError):
            scaler.step(optimizer)
        model = Heads()
        optimizer = SVGD(model, LR, scale=SCALE, nonfinite="skip", **options)
        one_after_the_other(*compiled(model)(batches(1)[0]))
        with pytest.raises(RetainedGraphError):
            optimizer.step()


@pytest.mark.parametrize("reading", READINGS)
def test_graphs_that_are_kept_and_not_used_again_are_as_any(reading: str) -> None:
    """One pass through each of several: micro-batches, in the order of the forward passes."""
    found = []
    for is_compiled in (True, False):
        model, optimizer, run = pair(READINGS[reading])
        call = run if is_compiled else model
        for _ in range(2):
            optimizer.zero_grad()
            a, b, c, d = batches()
            retained(*call(a))
            of_b, of_c = call(b), call(c)  # two uses in one graph
            retained(*of_b)
            of_d = call(d)  # the first use again, while the second waits
            retained(*of_c)
            retained(*of_d)
            optimizer.step()
        found.append(everything(model, optimizer))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_graph_that_is_used_again_after_another_is_refused() -> None:
    _, optimizer, run = pair({"stale": True})
    (a, b), of_another = run(batches(1)[0]), batches(2)[1]
    a.backward(retain_graph=True)
    summed(*run(of_another))
    b.backward()
    with pytest.raises(RetainedGraphError):
        optimizer.step()


def test_a_gradient_for_the_input_counts_as_a_pass() -> None:
    """The compiled backward pass runs whole; so backward() is the second one."""
    _, optimizer, run = pair({"stale": True})
    x = batches(1)[0].requires_grad_()
    first, second = run(x)
    torch.autograd.grad(first, x, retain_graph=True)
    second.backward()
    with pytest.raises(RetainedGraphError):
        optimizer.step()


@pytest.mark.parametrize("clears", ["zero_grad", "step"])
def test_a_pass_behind_zero_grad_or_a_step_begins_anew(clears: str) -> None:
    """As an eager one does: what it brings belongs to the next step alone."""
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        optimizer = SVGD(model, LR, scale=SCALE, stale=True)
        run = compiled(model) if is_compiled else model
        y = run(batches(1)[0])
        y.cos().mean().backward(retain_graph=True)
        getattr(optimizer, clears)()
        optimizer.zero_grad()
        y.sin().mean().backward()
        optimizer.step()
        found.append(r_of(optimizer))
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)


def test_zero_grad_between_forward_and_backward() -> None:
    """Many a loop has it there: the pass under way keeps its number, and the next has another."""
    found = []
    for is_compiled in (True, False):
        model, optimizer, run = pair({"stale": True})
        for x, y in zip(batches(), reversed(batches()), strict=True):
            losses = (run if is_compiled else model)(x)
            optimizer.zero_grad()
            more = (run if is_compiled else model)(y)
            summed(*losses)
            summed(*more)
            optimizer.step()
        found.append(everything(model, optimizer))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_compiled_part_of_an_eager_model() -> None:
    found = []
    for is_compiled in (True, False):
        model = Heads()
        optimizer = SVGD(model, LR, scale=SCALE, stale=True)
        if is_compiled:
            model.body.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            optimizer.zero_grad()
            for x in batches():  # micro-batches
                summed(*model(x))
            optimizer.step()
        found.append(everything(model, optimizer))
        optimizer.zero_grad()
        one_after_the_other(*model(batches(1)[0]))
        if is_compiled:
            with pytest.raises(RetainedGraphError, match=r"at body:linear\(weight\);"):
                optimizer.step()
        else:
            optimizer.step()
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Places(nn.Module):
    """A site without samples, where g is added up however many passes bring it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.arange(8.0, dtype=torch.float64).reshape(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.place.cumsum(0).mean(0)
        return y.cos().mean(), y.sin().mean()


def test_a_site_without_samples_takes_any_number_of_passes() -> None:
    found = []
    for is_compiled in (True, False):
        model = Places()
        chosen = {"where": lambda site: not site.has_sample_axis, "stale": True}
        optimizer = SVGD(model, LR, scale=SCALE, **chosen)
        for x in batches():
            optimizer.zero_grad()
            one_after_the_other(*(compiled(model) if is_compiled else model)(x))
            optimizer.step()
        found.append(everything(model, optimizer))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_it_costs_nothing_that_is_written_and_no_compilation() -> None:
    """The number of a graph is an input, and is kept beside what sites count anyway."""
    graphs: list[Any] = []

    def looked_at(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def ops(graph: Any) -> list[str]:
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    backend = aot_autograd(fw_compiler=looked_at, bw_compiler=looked_at)
    optimizer = SVGD.released(model, 1e-6)
    run = compiled(model, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pieces in (1, 1, 3):
            optimizer.zero_grad()
            for _ in range(pieces):
                run(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    forward, backward = graphs
    assert "aten.copy_.default" not in ops(forward)
    assert ops(backward).count("aten.copy_.default") == 6 + 6  # the candidates, the counts
