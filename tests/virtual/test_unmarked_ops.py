"""What users do in a pass that marks would miss, or that would meet them: T acts all the same.

(Found by a review of :mod:`virtualgrad.virtual.marks`.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from factors import STEPS, factors, twice
from modes import Counting
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import VirtualGradientDescent
from virtualgrad.virtual.native_forward import InCpp
from virtualgrad.virtual.parameters import TrackedParameters


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        return y


def test_weights_that_are_untied() -> None:
    """The one that keeps neither its name nor its place is an op's parameter still."""
    model = Tied()
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    model(torch.randn(4, 3)).sum().backward()
    model.a.weight = nn.Parameter(model.a.weight.detach().clone())
    optimizer.add_param_group({"params": [model.a.weight]})
    for _ in range(STEPS):
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        model(x).sum().backward()
        plain = torch.ones(4, 3).t() @ torch.tanh(x @ model.a.weight.t())
        torch.testing.assert_close(model.b.weight.grad, 2 * plain)
    optimizer.detach()


class Silent(Tensor):
    """A tensor that runs its ops so that no other class is asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Layers, and what comes between them."""

    def __init__(self, between: Callable[[Tensor, int], Tensor] = lambda x, call: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.gain = nn.Parameter(torch.rand(3))
        self.between, self.calls = between, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.last(self.between(self.first(x) * self.gain, self.calls))
        return y


@pytest.mark.parametrize("layer", [0, 1])
def test_tensors_of_a_class_that_come_late_and_ask_nobody(layer: int) -> None:
    model = Layers(lambda x, call: x.as_subclass(Silent) if call > 4 else x)
    run = lambda model, x: model(x).as_subclass(Tensor)  # noqa: E731
    assert factors(model, lambda: model.last[layer].weight, run=run) == pytest.approx([2] * STEPS)


def test_tensors_of_such_a_class_in_a_list() -> None:
    class First(nn.Linear):
        def forward(self, inputs: list[Tensor]) -> Tensor:  # type: ignore[override]
            y: Tensor = super().forward(inputs[0])
            return y

    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Sequential(First(3, 2)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.inner([x.as_subclass(Silent) if self.calls > 4 else x])
            return y.as_subclass(Tensor)

    model = Listing()
    assert factors(model, lambda: model.inner[0].weight) == pytest.approx([2] * STEPS)


def test_jagged_tensors_that_come_late_are_refused_as_early_ones() -> None:
    def jagged(x: Tensor, call: int) -> Any:
        return torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)

    for first in (1, 5):
        model = Layers(lambda x, call, first=first: jagged(x, call) if call >= first else x)
        optimizer = VirtualGradientDescent(model, 0.0, twice)
        with pytest.raises(RuntimeError, match="view"):
            for _ in range(STEPS):
                sigma: Any = model(torch.randn(4, 3))
                (sigma if type(sigma) is Tensor else sigma.values()).sum().backward()
        optimizer.detach()


def test_a_pass_in_which_subclasses_are_not_asked() -> None:
    model = Layers()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            y: Tensor = model(x)
        return y

    assert factors(model, lambda: model.gain, run=run) == pytest.approx([2] * STEPS)


def test_parameters_that_are_made_of_marked_ones_are_plain() -> None:
    made: list[Any] = []
    model = Layers()

    def make(x: Tensor, call: int) -> Tensor:
        of = (model.gain, model.first.weight)
        made.extend(nn.Parameter(each) for each in of)
        made.extend(type(each)(each.detach().clone(), requires_grad=False) for each in of)
        return x

    model.between = make
    assert factors(model, lambda: model.gain) == pytest.approx([2] * STEPS)
    assert {type(each) for each in made} == {nn.Parameter}
    again = nn.Parameter(made[-4])
    assert again.data_ptr() == model.gain.data_ptr()
    assert again.requires_grad and not made[-1].requires_grad
    assert "_is_param" not in vars(made[-4])


@pytest.mark.parametrize("around", [Counting, lambda: torch.device("cpu")], ids=["own", "device"])
def test_modes_around_a_pass_stay_above_ours(around: Callable[[], Any]) -> None:
    """Where another mode is on, ours is, from the start; a view in it changes nothing."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(2, 3))
            self.stacks: list[list[str]] = []

        def forward(self, x: Tensor) -> Tensor:
            view = self.w.t()
            modes = torch.overrides._get_current_function_mode_stack()
            self.stacks.append([type(mode).__name__ for mode in modes])
            return x @ view

    model = Viewed()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with around():
            y: Tensor = model(x)
        return y

    assert factors(model, lambda: model.w, run=run) == pytest.approx([2] * STEPS)
    with_ours = [stack for stack in model.stacks if len(stack) == 2]
    assert len(with_ours) == STEPS
    assert {stack[1] for stack in with_ours} == {"Intercept"}
    assert torch._C._len_torch_function_stack() == 0


def test_a_backward_pass_inside_of_a_forward_pass() -> None:
    """By checkpoints, whose layers run again in it; a view brings the mode, and goes."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.out = nn.Linear(3, 3), nn.Parameter(torch.rand(3))
            self.is_checkpointed = True

        def forward(self, x: Tensor) -> Tensor:
            def layer(x: Tensor) -> Tensor:
                y: Tensor = torch.tanh(self.linear(x))
                return y

            x = x.detach().requires_grad_()
            checkpointed = self.is_checkpointed
            h = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            energy = (h + self.out.view(3)).square().sum()
            (force,) = torch.autograd.grad(energy, x, retain_graph=True)
            return h.sum(1, keepdim=True) + energy + force

    model, x = Forces(), torch.randn(4, 3)
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    for step in range(STEPS):
        found = []
        for model.is_checkpointed in (True, False):
            optimizer.zero_grad()
            sigma = model(x)
            sigma.sum().backward()
            found.append([sigma, model.linear.weight.grad, model.out.grad])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, msg=f"step {step}")
    assert torch._C._len_torch_function_stack() == 0
    optimizer.detach()


def test_two_models_in_one_op() -> None:
    """Each has its own T, also where the parameters of both are arguments of one op."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(2, 3))

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return F.linear(x, self.w, bias)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.b, self.inner = nn.Parameter(torch.rand(2)), [inner]  # none of its modules

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner[0](x, self.b)
            return y

    inner = Inner()
    outer = Outer(inner)
    optimizers = [
        VirtualGradientDescent(outer, 0.0, twice),
        VirtualGradientDescent(inner, 0.0, lambda g, site: 3 * g),
    ]
    for _ in range(STEPS):
        x = torch.randn(4, 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        outer(x).sum().backward()
        torch.testing.assert_close(outer.b.grad, torch.full((2,), 2 * 4.0))
        torch.testing.assert_close(inner.w.grad, 3 * x.sum(0).expand(2, 3))
    for optimizer in optimizers:
        optimizer.detach()


def test_a_group_that_is_added_in_the_middle_of_a_pass() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.calls = nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                self.last = nn.Linear(3, 2, bias=False)
                optimizer.add_param_group({"params": [self.last.weight]})
            y: Tensor = self.first(x).tanh()
            return self.last(y) if self.calls >= 3 else y  # type: ignore[no-any-return]

    model = Growing()
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    for _ in range(STEPS):
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        model(x).sum().backward()
        if model.calls >= 3:
            plain = torch.ones(2, 4) @ model.first(x).tanh()
            torch.testing.assert_close(model.last.weight.grad, 2 * plain.detach())
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    optimizer.detach()


def test_parameters_that_are_replaced_are_let_go() -> None:
    """And with them their ids, which other tensors may get."""
    tracked, kept = TrackedParameters(), nn.Parameter(torch.rand(3))
    tracked.add({"w": nn.Parameter(torch.rand(3)), "v": kept})
    tracked.add({"w": nn.Parameter(torch.rand(3)), "v": nn.Parameter(torch.rand(3))})
    gc.collect()
    assert len(tracked.names) == 3
    assert [each is kept for each in tracked.all()] == [False, False, True]
    assert tracked.name_of(kept) == "v"


def test_a_pass_that_is_broken_off_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(InCpp, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 3))
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    optimizer.detach()


def test_meshgrid_of_a_parameter() -> None:
    """It asks for overrides in a function that it calls, and was run for ever."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.linear = nn.Parameter(torch.rand(3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows, _ = torch.meshgrid(self.p, torch.ones(3), indexing="ij")
            return self.linear(x @ rows)

    model = Grid()
    assert factors(model, lambda: model.linear.weight) == pytest.approx([2] * STEPS)
