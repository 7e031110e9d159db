"""Layers of torch.nn run unwatched once they are known; here is what must not be passed over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_twin import BATCH, CHANGED_AT, STEPS, Change, train_beside_twin
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD, Site, every_linear_site, weights_only
from virtualgrad.errors import ShapeChangedError
from virtualgrad.virtual import leaves, memories


class Network(nn.Module):
    """Layers of every kind that is known, and a parameter of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1, **options), nn.BatchNorm1d(4)
        self.linear, self.last = nn.Linear(4, 4), nn.LayerNorm(4)
        self.gain = nn.Parameter(torch.rand(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).mean(-1)
        return self.last(self.linear(self.linear(x)).exp())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bias


def share(model: Any) -> None:
    """Another layer's weight, which is tracked under that one's name."""
    model.last.weight = model.norm.weight


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.linear, "weight", Doubled())


def hooked(model: Any) -> None:
    model.linear.register_forward_hook(lambda module, inputs, output: output * model.gain)
    model.norm.register_forward_pre_hook(lambda module, inputs: inputs[0] * model.gain[:, None])


def dilated(model: Any) -> None:
    model.conv.padding = model.conv.dilation = (2,)


CHANGES: dict[str, Change] = {
    "none": lambda model: None,
    "another's weight": share,
    "parametrized": parametrized,
    "hooks with a parameter": hooked,
    "other options": dilated,
    "eval": lambda model: model.eval(),
}


@pytest.mark.parametrize("where", [every_linear_site, weights_only], ids=["all", "weights"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, where: Callable[[Site], bool]) -> None:
    train_beside_twin(Network(), CHANGES[change], where)


@pytest.mark.parametrize("where", [every_linear_site, weights_only], ids=["all", "weights"])
def test_parameters_that_freeze_and_thaw(
    where: Callable[[Site], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where every layer is watched. (The reference names a site by what requires grad.)"""
    known, watched = Network(), Network()
    optimizers = [SVGD(known, LR, scale=SCALE, where=where)]
    monkeypatch.setattr(leaves, "LEAVES", {})
    optimizers.append(SVGD(watched, LR, scale=SCALE, where=where))
    for step in range(3 * CHANGED_AT):
        for optimizer in optimizers:
            for layer in ("conv", "norm", "linear", "last"):
                is_frozen = step // CHANGED_AT == 1
                optimizer.model.get_parameter(f"{layer}.bias").requires_grad_(not is_frozen)
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            x = torch.randn(BATCH, 3, 5, generator=generator).double()
            optimizer.model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(known.state_dict(), watched.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_a_convolution_that_pads_by_itself(mode: str) -> None:
    train_beside_twin(Network(padding_mode=mode))


def test_a_subclass_with_a_forward_of_its_own() -> None:
    model = Network()
    model.linear = OwnLinear(4, 4).double()
    train_beside_twin(model)


def test_an_op_that_others_have_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.linear

    def patch(model: Any) -> None:
        monkeypatch.setattr(F, "linear", lambda x, weight, bias: 2 * plain(x, weight, bias))

    train_beside_twin(Network(), patch)


def doubling_linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(2 * x, layer.weight, layer.bias)


def doubling_convolution(layer: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(2 * x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def doubling_norm(layer: Any, x: Tensor) -> Tensor:
    return 2 * F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias)


METHODS = {
    "linear": (nn.Linear, "forward", doubling_linear),
    "convolution": (nn.Conv1d, "_conv_forward", doubling_convolution),
    "norm": (nn.LayerNorm, "forward", doubling_norm),
}
MOMENTS = pytest.mark.parametrize("at", [0, CHANGED_AT], ids=["before", "after"])
CHOICES: dict[str, Callable[[Site], bool]] = {
    "all": every_linear_site,
    "weights": weights_only,
    "nothing": lambda site: False,
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("layer", METHODS)
@MOMENTS
def test_a_method_that_others_have_put_in_place(
    at: int, layer: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patch(model: Any) -> None:
        monkeypatch.setattr(*METHODS[layer])

    train_beside_twin(Network(), patch, CHOICES[choice], at=at)


@pytest.mark.parametrize("choice", CHOICES)
@MOMENTS
def test_a_method_that_others_have_put_on_one_layer(at: int, choice: str) -> None:
    def patch(model: Any) -> None:
        model.conv._conv_forward = functools.partial(doubling_convolution, model.conv)

    train_beside_twin(Network(), patch, CHOICES[choice], at=at)


def test_a_method_that_was_not_torchs_own_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be imported, and patch, before this library is."""
    assert nn.Linear in leaves.known_leaves()
    monkeypatch.setattr(nn.Linear, "forward", functools.wraps(nn.Linear.forward)(doubling_linear))
    monkeypatch.setattr(nn.Conv1d, "_conv_forward", doubling_convolution)
    assert not {nn.Linear, nn.Conv1d} & leaves.known_leaves().keys()


def without_bias() -> Network:
    model = Network()
    model.linear = nn.Linear(4, 4, bias=False).double()
    return model


def with_buffer(model: Any) -> None:
    del model.linear.bias
    model.linear.register_buffer("bias", torch.ones(4).double())


def with_attribute(model: Any) -> None:
    del model.linear.bias
    model.linear.bias = torch.ones(4).double()


def with_norm(model: Any) -> None:
    nn.utils.weight_norm(model.linear, "bias", dim=None)


def with_parametrization(model: Any) -> None:
    parametrize.register_parametrization(model.linear, "bias", Doubled())


BIASES: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "buffer": (without_bias, with_buffer),
    "attribute": (without_bias, with_attribute),
    "weight norm": (Network, with_norm),
    "parametrization": (Network, with_parametrization),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
# Parameters that weight norm makes after the optimizer: it says so, and does not move them.
@pytest.mark.filterwarnings("ignore:.*have come to Network:UserWarning")
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("bias", BIASES)
@MOMENTS
def test_a_bias_that_is_no_parameter_of_its_layer(
    at: int, bias: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where every layer is watched. (The reference names a site by what requires grad.)"""
    make, change = BIASES[bias]
    models = [make(), make()]
    if at == 0:
        for model in models:
            change(model)
    known = SVGD(models[0], LR, scale=SCALE, where=CHOICES[choice])
    monkeypatch.setattr(leaves, "LEAVES", {})
    watched = SVGD(models[1], LR, scale=SCALE, where=CHOICES[choice])
    for step in range(STEPS):
        for model, optimizer in zip(models, (known, watched), strict=True):
            if step == at > 0:
                change(model)
            x = torch.randn(BATCH, 3, 5, generator=torch.Generator().manual_seed(step)).double()
            optimizer.zero_grad()
            output = model(x)
            with torch.no_grad():
                torch.testing.assert_close(output, model(x))
            output.square().mean().backward()
            without = [name for name, p in model.named_parameters() if p.grad is None]
            assert without == ["gain"]
            optimizer.step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


def test_another_mode_sees_the_ops() -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = Network()
    with SVGD(model, LR, where=weights_only):
        for _ in range(3):
            model(torch.randn(BATCH, 3, 5).double()).sum().backward()
        with Watching():
            model(torch.randn(BATCH, 3, 5).double())
    assert {F.linear, F.conv1d, F.batch_norm, F.layer_norm} <= set(seen)


def test_a_layer_whose_input_is_a_parameter() -> None:
    class OnParameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.linear = nn.Parameter(torch.randn(BATCH, 4)), nn.Linear(4, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.table.view(BATCH, 4)).exp() + x.mean((1, 2))[:, None]

    train_beside_twin(OnParameter())


def test_what_is_left_out_runs_as_it_is() -> None:
    """Its backward pass, too, is torch's own: no Python in it."""
    model, found = Network(), []
    with SVGD(model, LR, where=weights_only):
        model.norm.register_forward_hook(lambda m, x, sigma: found.append(sigma.grad_fn.name()))
        for _ in range(4):
            model(torch.randn(BATCH, 3, 5).double()).sum().backward()
    assert found[1:] == ["NativeBatchNormBackward0"] * 3


def test_a_convolution_that_pads_otherwise_from_now_on() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 36, 2))
    optimizer = SVGD(model, 1e-3)
    x = torch.randn(BATCH, 3, 6, 6)
    for mode in ("zeros", "zeros", "circular", "zeros"):
        model[0].padding_mode = mode
        model[0]._reversed_padding_repeated_twice = [1, 1, 1, 1]
        optimizer.zero_grad()
        found = model(x)
        with torch.no_grad():
            torch.testing.assert_close(found, model(x))
        found.square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(4, 3), (BATCH, 4)), (nn.Conv1d(4, 3, 1), (BATCH, 4, 5))],
    ids=["linear", "convolution"],
)
def test_rows_that_were_pruned_through_data(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """The same tensor, with fewer rows than r has: said as for any other change of shape."""
    optimizer = SVGD(nn.Sequential(layer), LR)
    x = torch.randn(shape)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.model(x).square().mean().backward()
        optimizer.step()
    for parameter in layer.parameters():
        parameter.data = parameter.data[:1]
    optimizer.zero_grad()
    with pytest.raises(ShapeChangedError, match="0:"):
        optimizer.model(x).square().mean().backward()


def test_inputs_of_ever_new_sizes_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "SITUATIONS_REMEMBERED", 10)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    twin = Twin(model, share_positions=True)
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    layers = optimizer._attachment.intercept._memories.layers
    for length in (*range(1, 30), *range(1, 4), *range(1, 4)):
        x = torch.randn(BATCH, length, 4).double()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        twin.backward(twin.model(x).square().mean(), BATCH)
        twin.optimizer.step()
        assert 0 < sum(len(layer.parts) for layer in layers.values()) <= 10
    assert_trained_alike(model, twin.model)


def test_a_list_among_the_options_that_is_changed_in_place() -> None:
    model = nn.Conv1d(2, 3, 1).double()
    model.stride = [1]  # type: ignore[assignment]
    optimizer = SVGD(model, 0.1)
    x = torch.randn(4, 2, 6).double()
    for stride in (1, 1, 2, 3):
        model.stride[0] = stride  # type: ignore[index]
        optimizer.zero_grad()
        assert model(x).shape == (4, 3, 6 // stride)
