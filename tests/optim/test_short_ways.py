"""The short ways of a plain training step lead where the long ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from beside_twin import BATCH, Change, train_beside_twin
from torch import Tensor, nn
from twin import LR

from virtualgrad import SVGD, native
from virtualgrad.virtual import leaves, ops, unwatched


class Features(nn.Module):
    """Layers with parameters in an nn.Sequential, and a parameter that hooks may use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 4)
        layers = (nn.Flatten(), nn.Linear(15, 5), self.linear, nn.BatchNorm1d(4), nn.Tanh())
        self.features = nn.Sequential(*layers)
        self.gain = nn.Parameter(torch.rand(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).exp()


def halved(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor, ...]:
    return tuple(0.5 * each for each in inputs)


def doubled(module: nn.Module, outputs: Any) -> tuple[Tensor, ...]:
    return tuple(2 * each for each in outputs)


def called_otherwise(model: Any) -> None:
    linear = model.linear
    linear._call_impl = lambda x: linear.forward(x) * model.gain


CHANGES: dict[str, Change] = {
    "none": lambda model: None,
    "a hook": lambda model: model.linear.register_forward_hook(
        lambda module, inputs, output: output * model.gain
    ),
    "a hook before it": lambda model: model.linear.register_forward_pre_hook(
        lambda module, inputs: inputs[0] * model.gain[0]
    ),
    "a hook behind its backward": lambda model: model.linear.register_full_backward_hook(halved),
    "a hook before its backward": lambda model: model.linear.register_full_backward_pre_hook(
        doubled
    ),
    "a call of its own": called_otherwise,
}


@pytest.mark.parametrize("at", [0, 3], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_in_a_sequence_is_called_as_others_have_made_it(change: str, at: int) -> None:
    train_beside_twin(Features(), CHANGES[change], at=at)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_behind_the_backward_of_all_modules() -> None:
    def halve_tanh(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return halved(module, inputs, outputs) if isinstance(module, nn.Tanh) else None

    handle = nn.modules.module.register_module_full_backward_hook(halve_tanh)
    try:
        train_beside_twin(Features())
    finally:
        handle.remove()


def test_hooks_on_all_modules_that_come_in_the_middle() -> None:
    """Of a sequence: the modules behind it are called, and not only run."""
    seen: list[nn.Module] = []
    handles: list[Any] = []

    class Registers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            register = nn.modules.module.register_module_forward_pre_hook
            handles.append(register(lambda module, inputs: seen.append(module)))
            return x

    model = nn.Sequential(nn.Linear(3, 4), Registers(), nn.Linear(4, 2), nn.Tanh())
    optimizer = SVGD(model, LR)
    for _ in range(3):
        seen.clear()
        model(torch.randn(BATCH, 3)).sum().backward()
        optimizer.step()
        handles.pop().remove()
        assert seen == [model[2], model[3]]


def test_a_forward_that_others_have_put_on_the_class_of_an_attached_layer() -> None:
    model = Features()
    x = torch.randn(BATCH, 3, 5).double()
    with SVGD(model, LR):
        for _ in range(2):
            model(x).sum().backward()
        with mock.patch.object(type(model.linear), "forward", lambda self, x: 0 * x[:, :4]):
            assert model(x).eq(1).all()


def test_a_call_that_others_have_put_in_place_before_the_import_is_not_skipped() -> None:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._wrapped_call_impl(self, *args, **kwargs)

    assert leaves.method_of_all(nn.Module.__call__) is nn.Module.__call__
    assert leaves.method_of_all(call) is not call


def test_layers_of_a_sequence_are_not_called_but_run(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []
    model = Features()
    with SVGD(model, LR) as optimizer:
        for _ in range(2):
            model(torch.randn(BATCH, 3, 5).double()).sum().backward()
            optimizer.step()
        monkeypatch.setattr(nn.Module, "_wrapped_call_impl", noting(called))
        monkeypatch.setattr(nn.Module, "__call__", nn.Module._wrapped_call_impl)
        monkeypatch.setattr(leaves, "CALL", nn.Module.__call__)
        model(torch.randn(BATCH, 3, 5).double())
        with torch.autograd.profiler.profile():  # it tells which module has called an op
            model(torch.randn(BATCH, 3, 5).double())
    assert called == [model, model.features, model, model.features, *model.features]


def noting(called: list[nn.Module]) -> Callable[..., Any]:
    run = nn.Module._wrapped_call_impl

    def note(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return run(self, *args, **kwargs)

    return note


def test_a_bias_in_a_sequence_that_gets_an_optimizer_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first optimizer knows the layer by then, and has its weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh()).double()
    other = copy.deepcopy(model)
    train_weights_then_bias(model)
    monkeypatch.setattr(unwatched, "may_skip_calls", lambda: False)
    train_weights_then_bias(other)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def train_weights_then_bias(model: Any) -> None:
    optimizers = [SVGD(model, LR, params=[model[0].weight, model[2].weight])]
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        if step == 3:
            optimizers.append(SVGD(model[2], LR, params=[model[2].bias]))
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(BATCH, 3, generator=generator).double()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 4)),
    "tokens": lambda: nn.Linear(5, 70),
    "convolution": lambda: nn.Conv2d(2, 3, 3),
    "norm": lambda: nn.BatchNorm2d(2),
}
METHODS: dict[str, Callable[[nn.Module], SVGD]] = {
    "SVGD": lambda model: SVGD(model, LR),
    "released": lambda model: SVGD.released(model, LR),
    "released, with its bias": lambda model: SVGD.released(model, LR, where=lambda site: True),
    "shared": lambda model: SVGD(model, LR, share_positions=True),
    "a bias of its own": lambda model: SVGD(
        model, LR, params=[{"params": [p], "rho": 0.5 + 0.1 * p.dim()} for p in model.parameters()]
    ),
}
PASSES: dict[str, Callable[[Any, Any, Any, Tensor], object]] = {
    "all": lambda loss, weight, bias, x: loss.backward(),
    "all, the bias frozen": lambda loss, weight, bias, x: loss.backward(),
    "the weight's": lambda loss, weight, bias, x: loss.backward(inputs=[weight]),
    "the bias's": lambda loss, weight, bias, x: loss.backward(inputs=[bias]),
    "the input's": lambda loss, weight, bias, x: torch.autograd.grad(loss, x),
    "twice": lambda loss, weight, bias, x: (loss.backward(retain_graph=True), loss.backward()),
}


def results(model: nn.Module, method: str, made: str) -> dict[str, Any]:
    """The gradients and the state that some passes leave."""
    optimizer = METHODS[method](model)
    weight, bias = model.parameters()
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        bias.requires_grad_(made != "all, the bias frozen" or step == 0)
        x = torch.randn(4, 2, 5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        returned = PASSES[made](model(x).square().mean(), weight, bias, x)
        optimizer.step()
    state = optimizer.operator.state  # type: ignore[attr-defined]
    gradients = {"weight": weight.grad, "bias": bias.grad, "x": x.grad}
    return {**gradients, "returned": returned, "r": state}


@pytest.fixture
def nodes_of_python() -> Iterator[None]:
    """Whose ways these are, also where those of C++ were built (tests/native has theirs)."""
    native.use(False)
    yield
    native.use(True)


@pytest.mark.usefixtures("nodes_of_python")
@pytest.mark.parametrize("made", PASSES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", LAYERS)
def test_both_ways_through_a_backward_pass_are_one(
    layer: str, method: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    ask = ops._is_plain_pass

    def note(*arguments: Any) -> bool:
        answers.append(ask(*arguments))
        return answers[-1]

    torch.manual_seed(0)
    model = LAYERS[layer]().double()
    other = copy.deepcopy(model)
    monkeypatch.setattr(ops, "_is_plain_pass", note)
    short = results(model, method, made)
    monkeypatch.setattr(ops, "_is_plain_pass", lambda *arguments: False)
    torch.testing.assert_close(short, results(other, method, made), rtol=0, atol=0)
    left_out = layer == "norm" and method == "released"
    if made == "all" and not left_out:
        assert set(answers) == {method != "a bias of its own"}
    if made in ("the bias's", "the input's", "twice"):
        assert not any(answers)
