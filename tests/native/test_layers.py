"""Nodes of C++ train as those of Python do, to the last bit, in every kind of pass."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, VirtualGradientDescent, native, operators
from virtualgrad.errors import DoubleBackwardError
from virtualgrad.virtual.convolutions import Convolution
from virtualgrad.virtual.products import Linear

pytestmark = pytest.mark.usefixtures("in_cpp")

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Tensor], Tensor]


def frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


LR = 1e-3
IMAGES, TOKENS, ROWS = (4, 6, 8, 8), (4, 5, 6), (4, 6)
LAYERS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 6), ROWS),
    "linear, wide": (lambda: nn.Linear(6, 6), (40, 6)),
    "linear, no bias": (lambda: nn.Linear(6, 6, bias=False), ROWS),
    "linear, frozen weight": (lambda: frozen(nn.Linear(6, 6), "weight"), ROWS),
    "linear, frozen bias": (lambda: frozen(nn.Linear(6, 6), "bias"), ROWS),
    "tokens": (lambda: nn.Linear(6, 6), TOKENS),
    "conv1d": (lambda: nn.Conv1d(6, 6, 3, padding=1), (4, 6, 9)),
    "conv2d": (lambda: nn.Conv2d(6, 6, 3, padding=1), IMAGES),
    "conv2d, no bias": (lambda: nn.Conv2d(6, 6, 3, padding=1, bias=False), IMAGES),
    "conv2d, groups, strides": (
        lambda: nn.Conv2d(6, 6, 3, stride=(1, 1), padding=(2, 1), dilation=(2, 1), groups=2),
        IMAGES,
    ),
    "conv2d, frozen bias": (lambda: frozen(nn.Conv2d(6, 6, 1), "bias"), IMAGES),
    "conv3d": (lambda: nn.Conv3d(6, 6, 1), (3, 6, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 6, 3, padding=1, output_padding=0), IMAGES),
}
READINGS: dict[str, Callable[[nn.Module], VirtualGradientDescent]] = {
    "released": lambda model: SVGD.released(model, LR),
    "Algorithm 1": lambda model: SVGD(model, LR),
    "shared": lambda model: SVGD.released(model, LR, share_positions=True),
    "sign": lambda model: VirtualGradientDescent(model, LR, operators.Sign()),
}


class Network(nn.Module):
    """Two layers of a kind, the first of which is used twice; activations are made in place."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.first, self.second = build(), build()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.first(x), inplace=True)
        sigma: Tensor = self.second(self.first(x) + x)
        return sigma


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    build: Build,
    shape: tuple[int, ...],
    reading: Callable[[nn.Module], VirtualGradientDescent] = READINGS["released"],
    *,
    loss: Loss = square,
    backward: Callable[..., Any] = lambda loss, model, x: loss.backward(),
    autocast: bool = False,
    device: str = "cpu",
) -> tuple[list[Tensor], list[Any]]:
    """Parameters, gradients and r behind four steps of two micro-batches; what backward found."""
    torch.manual_seed(0)
    model = Network(build).to(device)
    optimizer = reading(model)
    found: list[Any] = []
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(shape).to(device).requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                value = loss(model, x)
            found.append(backward(value, model, x))
            found.append(x.grad)
        optimizer.step()
    kept = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    states = optimizer.state_dict()["state"].values()
    r = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    return [each.detach().clone() for each in (*kept, *r)], found


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    else:
        assert ours is theirs is None


def train_both_ways(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> None:
    """As nodes of C++ and as nodes of Python, to the same bits."""
    native.use(False)
    try:
        theirs = train(*args, **options)
    finally:
        native.use(True)
    with monkeypatch.context() as off:  # it is C++ indeed
        for function in (Linear, Convolution):
            off.setattr(function, "forward", None)
        ours = train(*args, **options)
    assert_same(ours, theirs)


@pytest.fixture(autouse=True)
def one_kernel_for_each_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU; otherwise cuDNN may sum in another order from one call to the next."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer: str, reading: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train_both_ways(monkeypatch, *LAYERS[layer], READINGS[reading], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", ["linear", "tokens", "conv2d"])
def test_autocast(layer: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bfloat16 on this CPU")
    train_both_ways(monkeypatch, *LAYERS[layer], autocast=True, device=device)


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    sigma: Tensor = checkpoint(model, x, use_reentrant=False)
    return sigma.square().mean()


def with_hooks_on_saved(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda kept: kept[0]):
        return square(model, x)


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + sum(p.abs().sum() for p in model.parameters() if p.requires_grad)


def twice(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def looked_at_first(loss: Tensor, model: nn.Module, x: Tensor) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    return found


def for_input_first(loss: Tensor, model: nn.Module, x: Tensor) -> Any:
    found = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return found


def for_some(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(inputs=[model.first.weight, x])  # type: ignore[list-item,union-attr]


LOSSES: dict[str, Loss] = {
    "checkpointed": checkpointed,
    "hooks on saved tensors": with_hooks_on_saved,
    "a penalty": with_penalty,
}
BACKWARDS: dict[str, Callable[..., Any]] = {
    "twice": twice,
    "looked at first": looked_at_first,
    "for the input first": for_input_first,
    "for some": for_some,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", ["linear", "conv2d"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, layer: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train_both_ways(monkeypatch, *LAYERS[layer], loss=LOSSES[loss], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", ["linear", "conv2d, no bias"])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_passes(
    backward: str, layer: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_both_ways(monkeypatch, *LAYERS[layer], backward=BACKWARDS[backward], device=device)


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_a_freed_graph_is_refused(layer: str) -> None:
    build, shape = LAYERS[layer]
    model = Network(build)
    optimizer = SVGD.released(model, LR)
    loss = square(model, torch.randn(shape))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.detach()


@pytest.mark.parametrize("layer", ["linear", "conv2d"])
def test_a_graph_of_the_backward_pass_is_refused(layer: str) -> None:
    build, shape = LAYERS[layer]
    model = Network(build)
    optimizer = SVGD.released(model, LR)
    with pytest.raises(DoubleBackwardError, match="create_graph"):
        square(model, torch.randn(shape)).backward(create_graph=True)
    optimizer.detach()


def test_forward_mode_is_refused() -> None:
    from torch.autograd import forward_ad

    model = Network(LAYERS["linear"][0])
    optimizer = SVGD.released(model, LR)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        model(forward_ad.make_dual(torch.randn(ROWS), torch.randn(ROWS)))
    optimizer.detach()


def test_a_graph_that_is_thrown_away_keeps_nothing() -> None:
    model = Network(LAYERS["linear"][0])
    optimizer = SVGD.released(model, LR)
    x = torch.randn(ROWS, requires_grad=True)
    kept = weakref.ref(x)
    sigma = model(x)
    passed = weakref.ref(optimizer._attachment.intercept.passes.current)
    del sigma, x
    gc.collect()
    assert kept() is None
    optimizer.zero_grad()
    gc.collect()
    assert passed() is None or passed() is optimizer._attachment.intercept.passes.current


class Scaled(Tensor):
    """A tensor that wants to see torch's functions, and doubles what a linear layer makes of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is torch._C._nn.linear else result


def test_an_input_that_is_no_plain_tensor_sees_its_ops() -> None:
    model = nn.Linear(6, 3)
    x = torch.randn(ROWS)
    expected = 2 * model(x)
    with SVGD.released(model, LR):
        for _ in range(3):  # as it is looked at first, and as it is remembered
            sigma = model(x.as_subclass(Scaled))
            assert type(sigma) is Scaled
            torch.testing.assert_close(sigma.as_subclass(Tensor), expected, rtol=0, atol=0)


def test_weights_that_are_computed_go_with_their_graph() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.made: list[weakref.ref[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.to(torch.float64)
            self.made.append(weakref.ref(weight))
            return nn.functional.linear(x, weight)

    model = Halved()
    optimizer = SVGD.released(model, LR)
    loss = square(model, torch.randn(ROWS).double())
    loss.backward()
    assert [made() for made in model.made] == [None]
    optimizer.step()


def test_where_backward_passes_are_compiled_nodes_are_of_python() -> None:
    from torch._dynamo import config

    model = nn.Linear(6, 3)
    with SVGD.released(model, LR), config.patch(compiled_autograd=True):
        sigma = model(torch.randn(ROWS))
    assert sigma.grad_fn is not None and sigma.grad_fn.name() == "LinearBackward"


def test_copies_of_an_attached_model_are_plain() -> None:
    model = Network(LAYERS["conv2d"][0])
    optimizer = SVGD.released(model, LR)
    x = torch.randn(IMAGES)
    square(model, x).backward()
    plain = copy.deepcopy(model)(x).grad_fn
    assert plain is not None and plain.name() == "ConvolutionBackward0"
    assert model(x).grad_fn.name() == "torch::autograd::CppNode<virtualgrad::Convolution>"
    optimizer.step()
