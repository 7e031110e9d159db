"""Nodes of C++ train as those of Python do, to the last bit, in every kind of pass."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from both_languages import (
    BACKWARDS,
    LOSSES,
    LR,
    READINGS,
    Build,
    Network,
    frozen,
    square,
    train_both_ways,
)
from devices import DEVICES
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.errors import DoubleBackwardError

pytestmark = pytest.mark.usefixtures("in_cpp")

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
