"""SVGD under torch.compile: the parameters of an eager run, in one graph that is compiled once."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, VirtualGradientDescent
from virtualgrad.operators import RMS

# Torch instantiates a Function where it traces one.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)

READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "released": {"per_sample": False, "stale": True},
    "shared": {"share_positions": True, "stale": True},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5)
    ).double()


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, 6, 6, generator=generator).double() for n in sizes]


def train(
    run: Callable[[Tensor], Tensor],
    optimizer: SVGD,
    inputs: list[Tensor],
    after: Callable[[int], None] = lambda step: None,
) -> None:
    for step, x in enumerate(inputs):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()
        after(step)


def assert_same(first: nn.Module, second: nn.Module, rtol: float = 1e-10) -> None:
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        assert (p - q).norm() <= rtol * p.norm(), name


def assert_same_state(ours: SVGD, theirs: SVGD) -> None:
    assert ours.operator.state.keys() == theirs.operator.state.keys()
    for key, state in theirs.operator.state.items():
        torch.testing.assert_close(ours.operator.state[key]["r"], state["r"], rtol=1e-10, atol=0)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_trains_as_eager_and_compiles_once(reading: str, backend: str) -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend=backend)
    ours, theirs = (SVGD(m, 1e-3, **READINGS[reading]) for m in (model, eager))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    train(run, ours, batches(4, 4, 4, 4), lambda step: schedules[0].step())
    train(eager, theirs, batches(4, 4, 4, 4), lambda step: schedules[1].step())
    assert_same(eager, model)
    assert graphs() == 1  # four learning rates, one graph
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_batches_of_changing_size(dynamic: bool | None) -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    sizes = (4, 5, 6, 7) if dynamic is not False else (4, 5, 4, 5)
    train(run, SVGD(model, 1e-3), batches(*sizes))
    train(eager, SVGD(eager, 1e-3), batches(*sizes))
    assert_same(eager, model)
    assert graphs() <= 2  # one for the first size, one for all others (or one per size)


@pytest.mark.parametrize("stale", [True, False])
def test_sequences_of_changing_length_share_positions(stale: bool) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = [torch.randn(5, length, 3).double() for length in (7, 8, 9, 6)]
    train(run, SVGD(model, 1e-3, share_positions=True, stale=stale), inputs)
    train(eager, SVGD(eager, 1e-3, share_positions=True, stale=stale), inputs)
    assert_same(eager, model)
    assert graphs() <= 2


@pytest.mark.parametrize("reading", READINGS)
def test_all_sizes_unknown_to_the_compiler(reading: str) -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    ours, theirs = (SVGD(m, 1e-3, **READINGS[reading]) for m in (model, eager))
    train(run, ours, batches(4, 3, 5, 4))
    train(eager, theirs, batches(4, 3, 5, 4))
    assert_same(eager, model)
    assert_same_state(ours, theirs)


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


def test_all_sites_count_in_one_kernel() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    optimizer = SVGD.released(model, 1e-6)
    run = torch.compile(model, fullgraph=True)

    def step() -> None:
        train(run, optimizer, [torch.randn(4, 8)])

    _, codes = run_and_get_code(step)
    names = re.findall(r"^(cpp_fused\w*) = async", codes[-1], re.MULTILINE)
    assert len([name for name in names if "arange" in name]) == 1, names


def test_attached_after_compilation() -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    run(batches(4)[0]).sum().backward()  # compiled as a plain model
    model.load_state_dict(eager.state_dict())
    train(run, SVGD(run, 1e-3), batches(4, 4))
    train(eager, SVGD(eager, 1e-3), batches(4, 4))
    assert_same(eager, model)


def test_detached_afterwards() -> None:
    model = network()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = SVGD(model, 1e-3)
    train(run, optimizer, batches(4))
    optimizer.detach()
    model.zero_grad()
    run(batches(4)[0]).square().mean().backward()
    got = [p.grad.clone() for p in model.parameters()]
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain.train()
    plain(batches(4)[0]).square().mean().backward()
    for gradient, p in zip(got, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_changed_scale_is_seen(dynamic: bool | None) -> None:
    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    ours, theirs = SVGD(model, 1e-3), SVGD(eager, 1e-3)

    def change(optimizer: SVGD) -> Callable[[int], None]:
        def change(step: int) -> None:
            optimizer.param_groups[0]["scale"] = 1 / (step + 2)

        return change

    train(run, ours, batches(4, 4, 4, 4, 4), change(ours))
    train(eager, theirs, batches(4, 4, 4, 4, 4), change(theirs))
    assert_same(eager, model)
    assert graphs() == 1


def test_a_scale_that_is_changed_too_late_is_told() -> None:
    model = network()
    optimizer = SVGD(model, 1e-3)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer.zero_grad()
    run(batches(4)[0]).sum().backward()
    optimizer.param_groups[0]["scale"] = 0.5
    with pytest.warns(UserWarning, match=r"group 0: scale went from 1 to 0.5 after zero_grad\(\)"):
        optimizer.step()


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


def test_r_lies_in_memory_as_sigma_does_and_g_is_not_copied():
    """Asked for its strides, a g would make torch.compile copy it into contiguous memory."""
    model = network().to(memory_format=torch.channels_last)
    x = batches(4)[0].to(memory_format=torch.channels_last)
    optimizer = SVGD.released(model, lr=0.1)
    backward: list[str] = []

    def looked_at(graph: Any, _: Any) -> Any:
        backward.append(graph.code)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=nop, bw_compiler=looked_at)
    torch.compile(model, backend=backend, fullgraph=True)(x).square().mean().backward()
    optimizer.step()
    r = optimizer.operator.state["0:conv2d(weight)"]["r"]
    assert r.shape == (4, 4, 4)
    assert r.stride() == (1, 16, 4)
    assert "aten.convolution_backward" in backward[0]
    assert "aten.clone" not in backward[0]


class Moody(nn.Module):
    """Raises in its forward, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, fails: bool) -> Tensor:
        x = self.first(x)
        if fails:
            raise ValueError("not today")
        return self.second(x)


def test_an_error_in_a_compiled_forward_is_the_users_own() -> None:
    """And the next pass is as if it had not been."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Moody().double()
    model = copy.deepcopy(eager)
    ours, theirs = SVGD(model, 1e-3), SVGD(eager, 1e-3)
    run = torch.compile(model, backend="aot_eager")
    for call, optimizer in ((run, ours), (eager, theirs)):
        for x in torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double():
            optimizer.zero_grad()
            call(x, False).square().mean().backward()
            with pytest.raises(ValueError, match="not today"):
                call(x, True)
            call(x, False).square().mean().backward()
            optimizer.step()
    assert_same(eager, model)
