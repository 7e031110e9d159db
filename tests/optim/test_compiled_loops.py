"""Loops around a compiled model: parts of it, several passes, checkpoints, a scaler, state."""

from __future__ import annotations

import copy

import pytest
import torch
from compiled_training import READINGS, assert_same, assert_same_state, batches, network, train
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, VirtualGradientDescent
from virtualgrad.operators import RMS

# Torch instantiates a Function where it traces one.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ),
]


@pytest.mark.parametrize("reading", READINGS)
def test_checkpoints_within_a_compiled_model(reading: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def checkpointed(self, x: Tensor) -> Tensor:
            return torch.relu(self.layers[0](x))

        def forward(self, x: Tensor) -> Tensor:
            middle = checkpoint(self.checkpointed, x, use_reentrant=False)
            logits: Tensor = self.layers[4](self.layers[1](middle).flatten(1))
            return logits

    eager = Checkpointed()
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend="aot_eager")
    ours, theirs = (SVGD(m, 1e-3, **READINGS[reading]) for m in (model, eager))
    train(run, ours, batches(4, 4, 4))
    train(eager, theirs, batches(4, 4, 4))
    assert_same(eager, model)
    assert_same_state(ours, theirs)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="checkpoint"):
        whole(batches(4)[0])


@pytest.mark.parametrize("reading", READINGS)
def test_compiled_between_two_micro_batches(reading: str) -> None:
    """What the eager one has brought to a site is not lost when the site is first compiled."""
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = (SVGD(m, 1e-3, **READINGS[reading]) for m in (model, eager))
    for first, second in zip(batches(4, 4), batches(3, 3), strict=True):
        for calls, optimizer in (((model, run), ours), ((eager, eager), theirs)):
            optimizer.zero_grad()
            for call, x in zip(calls, (first, second), strict=True):
                call(x).square().mean().backward()
            optimizer.step()
    assert_same(eager, model)
    assert_same_state(ours, theirs)


def test_an_operator_alone_knows_the_factor_of_the_loss() -> None:
    """As SVGD does, whose settings hold it."""
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for call, trained in ((eager, eager), (run, model)):
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = VirtualGradientDescent(trained, 1e-3, RMS(), grad_scaler=scaler)
        for x in batches(4, 4, 4, 4):
            optimizer.zero_grad()
            scaler.scale(call(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4096.0
        optimizer.detach()
    assert_same(eager, model)


@pytest.mark.parametrize("reading", READINGS)
def test_accumulation_equals_eager_accumulation(reading: str) -> None:
    eager = network()
    eager[1].eval()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for m, call in ((eager, eager), (model, run)):
        optimizer = SVGD(m, 1e-3, **READINGS[reading])
        for _ in range(3):
            optimizer.zero_grad()
            for x in batches(4, 4, 2):
                (call(x).square().mean() / 3).backward()
            optimizer.step()
    assert_same(eager, model)


def test_eager_and_compiled_passes_in_turn() -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = SVGD(model, 1e-3), SVGD(eager, 1e-3)
    for call in (run, model, run, model):
        train(call, ours, batches(4))
        train(eager, theirs, batches(4))
    assert_same(eager, model)


def test_a_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            torch._dynamo.graph_break()
            return self.second(x)

    torch.manual_seed(0)
    eager = Broken().double()
    model = copy.deepcopy(eager)
    run = torch.compile(model, backend="aot_eager")
    inputs = [torch.randn(4, 6).double() for _ in range(3)]
    train(run, SVGD(model, 1e-3), inputs)
    train(eager, SVGD(eager, 1e-3), inputs)
    assert_same(eager, model)


def test_a_compiled_part_of_an_eager_model() -> None:
    eager = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    model = copy.deepcopy(eager)
    model[2].compile(backend="aot_eager", fullgraph=True)
    inputs = [torch.randn(4, 6).double() for _ in range(3)]
    train(model, SVGD(model, 1e-3), inputs)
    train(eager, SVGD(eager, 1e-3), inputs)
    assert_same(eager, model)


def test_state_loaded_before_and_after_compilation() -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    first, second = SVGD(eager, 1e-3), SVGD(model, 1e-3)
    train(eager, first, batches(4, 4))
    saved = copy.deepcopy((eager.state_dict(), first.state_dict()))
    for _ in range(2):  # into a model that was never run, then into a compiled one
        model.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        eager.load_state_dict(saved[0])
        first.load_state_dict(copy.deepcopy(saved[1]))
        train(run, second, batches(4, 4))
        train(eager, first, batches(4, 4))
        assert_same(eager, model)
        assert second.operator.state.keys() == first.operator.state.keys()


def test_a_compiled_step() -> None:
    eager = network()
    model = copy.deepcopy(eager)
    ours, theirs = SVGD(model, 1e-3, momentum=0.5), SVGD(eager, 1e-3, momentum=0.5)
    step = torch.compile(ours.step, backend="aot_eager")
    for x in batches(4, 4, 4):
        for m, optimizer, make_step in ((model, ours, step), (eager, theirs, theirs.step)):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            make_step()
    assert_same(eager, model)


def test_a_model_that_is_called_twice_before_backward() -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = SVGD(model, 1e-3), SVGD(eager, 1e-3)
    for _ in range(3):
        for call, optimizer in ((run, ours), (eager, theirs)):
            optimizer.zero_grad()
            a, b = batches(4, 4)
            (call(a) - call(b)).square().mean().backward()
            optimizer.step()
    assert_same(eager, model)
    assert ours.operator.state.keys() == theirs.operator.state.keys()
