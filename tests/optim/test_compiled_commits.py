"""What compiled passes have brought: committed once, and forgotten where it is discarded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from compiled_training import READINGS, assert_same, assert_same_state, batches, network, train
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from virtualgrad import SVGD, Site, VirtualGradientDescent
from virtualgrad.errors import OperatorError, ShapeChangedError, StateDictError
from virtualgrad.operators import RMS, Clip, compose, running
from virtualgrad.virtual import passes

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ),
]

Run = Callable[[Tensor], Tensor]


def backward(run: Run, model: nn.Module, optimizer: SVGD, x: Tensor) -> None:
    run(x).square().mean().backward()


def grad(run: Run, model: nn.Module, optimizer: SVGD, x: Tensor) -> None:
    torch.autograd.grad(run(x).square().mean(), list(model.parameters()))


def backward_after_zero_grad(run: Run, model: nn.Module, optimizer: SVGD, x: Tensor) -> None:
    loss = run(x).square().mean()
    optimizer.zero_grad()
    loss.backward()


def grad_of_a_graph_that_was_kept(run: Run, model: nn.Module, optimizer: SVGD, x: Tensor) -> None:
    loss = run(x).square().mean()
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    torch.autograd.grad(loss, list(model.parameters()))


def eager_pass(run: Run, model: nn.Module, optimizer: SVGD, x: Tensor) -> None:
    model(x).square().mean().backward()


@functorch_config.patch(donated_buffer=False)  # so that graphs may be kept
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(
    "discarded",
    [backward, grad, backward_after_zero_grad, grad_of_a_graph_that_was_kept, eager_pass],
)
def test_zero_grad_forgets_what_was_discarded(discarded: Callable[..., None], reading: str) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    runs = [torch.compile(m, backend="aot_eager") for m in (plain, model)]
    theirs, ours = (SVGD(m, 1e-3, **READINGS[reading]) for m in (plain, model))
    usual, other = batches(4, 4, 4, 4), 3 * batches(4)[0]
    train(runs[0], theirs, usual)

    def discard(step: int) -> None:
        if step in (1, 2):
            before = copy.deepcopy(ours.operator.state)
            ours.zero_grad()
            discarded(runs[1], model, ours, other)
            ours.zero_grad()
            for key, state in ours.operator.state.items():
                assert torch.equal(state["r"], before[key]["r"])

    train(runs[1], ours, usual, discard)
    assert_same(plain, model)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("discarded", [False, True])
def test_zero_grad_forgets_a_graph_that_was_left_over(discarded: bool) -> None:
    """Of two that were alive at a time, by parts of a model that are compiled by themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer, x = SVGD(model, 1e-3), torch.randn(4, 3)
    first, second = (torch.compile(part, backend="aot_eager") for part in model)
    second(first(x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    left_over = second(50 * x).square().mean()
    first(x).square().mean().backward()
    optimizer.step()
    if discarded:
        left_over.backward()
    before = optimizer.operator.state["1:linear(weight)"]["r"].clone()
    optimizer.zero_grad()
    first(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(optimizer.operator.state["1:linear(weight)"]["r"], before)


def test_zero_grad_forgets_the_gradient_of_a_graph_that_was_left_over() -> None:
    states = []
    for discarded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer, x = SVGD(model, 1e-3), torch.randn(4, 3)
        run = torch.compile(model, backend="aot_eager")
        train(run, optimizer, [x])
        optimizer.zero_grad()
        left_over = run(50 * x).square().mean()
        run(x).square().mean().backward()
        optimizer.step()
        if discarded:
            torch.autograd.grad(left_over, list(model.parameters()))
        train(run, optimizer, [x])
        states.append(copy.deepcopy(optimizer.operator.state))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_nothing_is_copied_to_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = SVGD(model, 1e-3)
    run = torch.compile(model, backend="aot_eager")
    train(run, optimizer, batches(4, 4))
    rollbacks: list[int] = []
    rollback = optimizer.operator.rollback
    monkeypatch.setattr(optimizer.operator, "rollback", lambda: [rollbacks.append(1), rollback()])
    train(run, optimizer, batches(4, 4, 4))
    assert not rollbacks
    backward(run, model, optimizer, batches(4)[0])
    optimizer.zero_grad()
    assert len(rollbacks) == 1


def test_a_captured_zero_grad_forgets_whatever_is_there_when_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    optimizer = SVGD(model, 1e-3)
    train(torch.compile(model, backend="aot_eager"), optimizer, batches(4, 4))
    rollbacks: list[int] = []
    monkeypatch.setattr(optimizer.operator, "rollback", lambda: rollbacks.append(1))
    optimizer.zero_grad()
    assert not rollbacks
    monkeypatch.setattr(passes, "is_capturing", lambda: True)
    optimizer.zero_grad()
    assert rollbacks == [1]


@pytest.mark.parametrize("reading", READINGS)
def test_large_running_means_are_committed_by_themselves(
    reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = network()
    model = copy.deepcopy(eager)
    theirs, ours = (SVGD(m, 1e-3, **READINGS[reading]) for m in (eager, model))
    train(eager, theirs, batches(4, 4, 4))
    sizes = sorted(state["r"].numel() for state in theirs.operator.state.values())
    monkeypatch.setattr(running, "LARGE", sizes[-1])  # some are, others are not
    train(torch.compile(model, backend="aot_eager"), ours, batches(4, 4, 4))
    assert_same(eager, model)
    assert_same_state(ours, theirs)


class Limited(RMS):
    """T of SVGD, with a bound on every number of T(g)."""

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        return super().__call__(g, site).clamp(-0.01, 0.01)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_subclass_with_a_call_of_its_own_is_not_passed_over(fullgraph: bool) -> None:
    model = network()
    error = torch._dynamo.exc.Unsupported if fullgraph else OperatorError
    with VirtualGradientDescent(model, 1e-3, Limited()):
        run = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
        with pytest.raises(error, match="a subclass of RMS with a __call__"):
            run(batches(4)[0])


@pytest.mark.parametrize("composed", [False, True])
def test_a_state_of_another_shape_is_refused_where_compiled_passes_write(composed: bool) -> None:
    def optimizer_of(model: nn.Module) -> VirtualGradientDescent:
        operator = compose(Clip(1.0), RMS()) if composed else RMS()
        return VirtualGradientDescent(model, 1e-3, operator)

    def steps(run: Run, optimizer: VirtualGradientDescent, x: Tensor) -> None:
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()

    small, large = (nn.Conv2d(3, 4, 3) for _ in range(2))
    ours, theirs = optimizer_of(small), optimizer_of(large)
    run = torch.compile(small, backend="aot_eager")
    steps(run, ours, torch.randn(2, 3, 6, 6))
    steps(large, theirs, torch.randn(2, 3, 7, 7))
    before = copy.deepcopy(ours.state_dict())
    theirs.param_groups[0]["lr"] = 0.5
    with pytest.raises(ShapeChangedError, match="before the first compiled pass"):
        ours.load_state_dict(theirs.state_dict())
    after = ours.state_dict()
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    assert after["param_groups"] == before["param_groups"]
    ours.load_state_dict(before)
    steps(run, ours, torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize("names", ["r", "0.r", "1.r"])
def test_a_state_of_another_operator_is_refused(names: str) -> None:
    saved = {"fc:linear(weight)": {names: torch.ones(3)}}
    for operator, own in ((RMS(), "r"), (compose(Clip(1.0), RMS()), "0.r")):
        if names == own:
            operator.state = saved
            assert operator.state.keys() == saved.keys()
            continue
        with pytest.raises(StateDictError, match="a saved state of fc:linear"):
            operator.state = saved
        assert not operator.state
