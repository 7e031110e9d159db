"""Layers without parameters run unwatched, and batch norms by their op: nothing else may change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_twin import BATCH, Change, train_beside_twin
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from twin import LR

from virtualgrad import SVGD
from virtualgrad.virtual import leaves
from virtualgrad.virtual.intercept import Intercept


class Table(nn.Module):
    """Hands out its parameter in another guise."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(2, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.table.view(1, 2, 2)


class Rectified(nn.Module):
    """Layers without parameters behind others, one of them behind a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.relu, self.last = nn.Linear(15, 4), nn.ReLU(), nn.Linear(4, 3)
        self.features = nn.Sequential(nn.Flatten(), self.linear, self.relu)
        self.rows = nn.Sequential(Table(), nn.Flatten())
        self.gain = nn.Parameter(torch.rand(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x) * self.rows(x).view(-1)).exp()


def test_they_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    watch = Intercept.__torch_function__

    def note(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return watch(self, func, types, args, kwargs)

    monkeypatch.setattr(Intercept, "__torch_function__", note)
    model = Rectified()
    with SVGD(model, LR):
        model(torch.randn(BATCH, 3, 5).double())
    assert F.relu not in seen
    assert torch.relu not in seen
    assert seen.count(Tensor.flatten) == 1  # of the parameter, but not of x


class Scaled(nn.ReLU):
    """Knows a parameter that it does not call its own."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.known = [gain]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.known[0]


def hooked(model: Any) -> None:
    model.relu.register_forward_hook(lambda module, inputs, output: output * model.gain)


def hooked_before(model: Any) -> None:
    model.relu.register_forward_pre_hook(lambda module, inputs: inputs[0] * model.gain)


def with_own_forward(model: Any) -> None:
    model.relu.forward = lambda x: F.relu(x) * model.gain


CHANGES: dict[str, Change] = {
    "none": lambda model: None,
    "a hook with a parameter": hooked,
    "a hook before it": hooked_before,
    "a forward of its own": with_own_forward,
    "in place": lambda model: setattr(model.relu, "inplace", True),
    "another layer": lambda model: model.features.__setitem__(2, nn.GELU()),
    "a subclass": lambda model: model.features.__setitem__(2, Scaled(model.gain)),
}


@pytest.mark.parametrize("at", [0, 3], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, at: int) -> None:
    train_beside_twin(Rectified(), CHANGES[change], at=at)


PLACES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "op": (F, "relu", lambda scaled: lambda x, inplace=False: scaled(x)),
    "method": (nn.ReLU, "forward", lambda scaled: lambda self, x: scaled(x)),
    "call": (nn.ReLU, "__call__", lambda scaled: lambda self, x: scaled(x)),
    "call of all": (nn.Module, "__call__", lambda scaled: lambda self, x: of_all(scaled, self, x)),
}
CALL = nn.Module.__call__


def of_all(scaled: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Tensor:
    return scaled(x) if type(module) is nn.ReLU else CALL(module, x)


@pytest.mark.parametrize("name", PLACES)
def test_what_others_have_put_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It meets a parameter of the model that runs, which no layer passes to it."""
    running: list[Any] = []
    place, attribute, made_of = PLACES[name]

    def scaled(x: Tensor) -> Tensor:
        return torch.clamp(x, min=0) * running[-1].gain

    class Running(Rectified):
        def forward(self, x: Tensor) -> Tensor:
            running.append(self)
            return super().forward(x)

    def patch(model: Any) -> None:
        monkeypatch.setattr(place, attribute, made_of(scaled))

    train_beside_twin(Running(), patch)


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_an_op_of_torch_that_others_have_put_in_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
    assert leaves.bare_leaf_of(layers[name]()) is not None
    monkeypatch.setattr(torch, name, lambda x: x)
    assert leaves.bare_leaf_of(layers[name]()) is None


@pytest.mark.parametrize("name", ["_call_impl", "_compiled_call_impl", "forward"])
def test_what_others_have_put_on_a_layer(name: str) -> None:
    layer = nn.ReLU()
    assert leaves.bare_leaf_of(layer) is not None
    setattr(layer, name, lambda x: x)
    assert leaves.bare_leaf_of(layer) is None


@pytest.mark.parametrize("learns", [True, False], ids=["grad", "no grad"])
def test_another_mode_sees_the_ops(learns: bool) -> None:
    seen: list[Any] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = Rectified()
    with SVGD(model, LR), Watching(), torch.set_grad_enabled(learns):
        model(torch.randn(BATCH, 3, 5).double())
    assert F.relu in seen


def test_layers_that_others_have_changed_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nn.ReLU in leaves.known_bare_leaves()
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    assert nn.ReLU not in leaves.known_bare_leaves()


def test_hooks_on_all_modules_are_watched() -> None:
    def patch(model: Any) -> None:
        known.append(model)

    def scale(module: nn.Module, inputs: Any, output: Any) -> Any:
        model = next((model for model in known if model.relu is module), None)
        return None if model is None else output * model.gain

    known: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(scale)
    try:
        train_beside_twin(Rectified(), patch)
    finally:
        handle.remove()


def test_they_keep_their_class() -> None:
    """Users look for it: ``if type(layer) == nn.Dropout: layer.train()``."""
    model = Rectified()
    with SVGD(model, LR):
        assert type(model.relu) is nn.ReLU


def test_a_layer_of_two_models_with_an_optimizer_each() -> None:
    first, second = Rectified(), Rectified()
    second.features[2] = first.relu
    optimizers = SVGD(first, LR), SVGD(second, LR)
    x = torch.randn(BATCH, 3, 5).double()
    for model, optimizer in zip((first, second), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm1d(4),
    "mean of all batches": lambda: nn.BatchNorm1d(4, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.BatchNorm2d(4), nn.Flatten()),
}


def last_norm(model: nn.Sequential) -> Any:
    return next(module for module in model.modules() if hasattr(module, "momentum"))


def renew_statistics(model: nn.Sequential) -> None:
    norm = last_norm(model)
    if norm.running_mean is not None:
        norm.running_mean = norm.running_mean + 1


EVENTS: tuple[Callable[[nn.Sequential], object], ...] = (
    lambda model: None,
    lambda model: None,
    lambda model: model.eval(),
    lambda model: model.train(),
    lambda model: setattr(last_norm(model), "momentum", 0.5),
    lambda model: setattr(last_norm(model), "eps", 0.1),
    renew_statistics,
    lambda model: setattr(last_norm(model), "num_batches_tracked", None),
    lambda model: setattr(last_norm(model), "track_running_stats", False),
    lambda model: last_norm(model).weight.requires_grad_(False),
)


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_counts_and_averages_as_it_does_alone(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), NORMS[kind](), nn.Linear(4, 2)).double()
    alone = copy.deepcopy(model)
    optimizer = SVGD(model, LR)
    for number, event in enumerate(EVENTS):
        event(model)
        event(alone)
        for batch in range(3):
            x = torch.randn(BATCH, 3).double() + number + batch
            y = model(x)
            assert torch.equal(y, alone(x))
            y.sum().backward()
            torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=0, atol=0)
        optimizer.zero_grad()
