"""SVGD under torch.compile: the parameters of an eager run, in one graph that is compiled once."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_training import READINGS, assert_same, assert_same_state, batches, network, train
from functorch.compile import make_boxed_func, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from virtualgrad import SVGD

# Torch instantiates a Function where it traces one.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ),
]


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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


def test_groups_in_another_order_keep_their_numbers() -> None:
    """A compiled pass knows its group by a number, which is not its place in the list."""

    def make(model: nn.Module) -> SVGD:
        parameters = list(model.parameters())
        half = len(parameters) // 2
        groups = [{"params": parameters[:half]}, {"params": parameters[half:], "scale": 0.25}]
        return SVGD(model, 1e-3, params=groups)

    eager = network()
    model = copy.deepcopy(eager)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = make(model), make(eager)

    def reorder(step: int) -> None:
        if step == 2:
            ours.param_groups.reverse()
        if step == 3:
            ours.load_state_dict(ours.state_dict())  # makes new dicts

    train(run, ours, batches(4, 4, 4, 4, 4), reorder)
    train(eager, theirs, batches(4, 4, 4, 4, 4))
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
