"""Norms as nodes of C++ train as those of Python do, to the last bit, in every kind of pass."""

from __future__ import annotations

import copy
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
from torch.nn import functional as F

from virtualgrad import SVGD, VirtualGradientDescent, operators, virtual_grad
from virtualgrad.errors import DoubleBackwardError, ModelError
from virtualgrad.virtual.layer_norms import LayerNorm
from virtualgrad.virtual.norms import BatchNorm

pytestmark = pytest.mark.usefixtures("in_cpp")

ROWS, SEQUENCES, IMAGES, TOKENS = (8, 6), (8, 6, 5), (8, 6, 4, 4), (4, 5, 6)
NODE = "torch::autograd::CppNode<virtualgrad::{}>"


def without(norm: nn.Module, name: str) -> nn.Module:
    norm.register_parameter(name, None)
    return norm


def trained_before(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """In evaluation, with means of its own."""
    norm(torch.randn(shape) * 3 + 1)
    return norm.eval()


NORMS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "rows": (lambda: nn.BatchNorm1d(6), ROWS),
    "sequences": (lambda: nn.BatchNorm1d(6), SEQUENCES),
    "images": (lambda: nn.BatchNorm2d(6), IMAGES),
    "images, evaluated": (lambda: trained_before(nn.BatchNorm2d(6), IMAGES), IMAGES),
    "rows, evaluated": (lambda: trained_before(nn.BatchNorm1d(6), ROWS), ROWS),
    "volumes": (lambda: nn.BatchNorm3d(6), (4, 6, 3, 3, 3)),
    "another momentum": (lambda: nn.BatchNorm2d(6, eps=1e-2, momentum=0.5), IMAGES),
    "a mean of all": (lambda: nn.BatchNorm1d(6, momentum=None), ROWS),
    "no running means": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGES),
    "batch norm, no weight": (lambda: without(nn.BatchNorm2d(6), "weight"), IMAGES),
    "batch norm, no bias": (lambda: without(nn.BatchNorm2d(6), "bias"), IMAGES),
    "batch norm, frozen weight": (lambda: frozen(nn.BatchNorm1d(6), "weight"), ROWS),
    "batch norm, frozen bias": (lambda: frozen(nn.BatchNorm1d(6), "bias"), ROWS),
    "tokens": (lambda: nn.LayerNorm(6), TOKENS),
    "layer norm of rows": (lambda: nn.LayerNorm(6, eps=1e-2), ROWS),
    "layer norm, several axes": (lambda: nn.LayerNorm((5, 6)), TOKENS),
    "layer norm, no weight": (lambda: without(nn.LayerNorm(6), "weight"), TOKENS),
    "layer norm, no bias": (lambda: nn.LayerNorm(6, bias=False), TOKENS),
    "layer norm, several axes, no bias": (lambda: nn.LayerNorm((5, 6), bias=False), TOKENS),
    "layer norm, frozen weight": (lambda: frozen(nn.LayerNorm(6), "weight"), TOKENS),
    "layer norm, frozen bias": (lambda: frozen(nn.LayerNorm(6), "bias"), TOKENS),
}
ALGORITHM_1 = READINGS["Algorithm 1"]
SOME = ["images", "rows", "images, evaluated", "tokens", "layer norm, no bias"]


def weights_only(model: nn.Module) -> VirtualGradientDescent:
    """T for weights alone: a bias gets the true g."""
    return SVGD(model, LR, where=lambda site: "weight" in site.roles)


def biases_only(model: nn.Module) -> VirtualGradientDescent:
    return SVGD(model, LR, where=lambda site: "bias" in site.roles)


WHERE = {**READINGS, "weights": weights_only, "biases": biases_only}


@pytest.fixture(autouse=True)
def one_kernel_for_each_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU; otherwise cuDNN may sum in another order from one call to the next."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reading", WHERE)
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: str, reading: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and norm == "batch norm, no weight":
        pytest.skip("torch's own backward fails there: 'tensor does not have a device'")
    train_both_ways(monkeypatch, *NORMS[norm], WHERE[reading], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [*SOME, "layer norm, several axes"])
def test_autocast(norm: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = NORMS[norm]

    class InBfloat16(nn.Module):
        """A norm whose input autocast has made."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.matrix = build(), nn.Parameter(torch.eye(shape[-1]))

        def forward(self, x: Tensor) -> Tensor:
            product = x @ self.matrix
            assert product.dtype == torch.bfloat16
            sigma: Tensor = self.norm(product)
            return sigma

    train_both_ways(monkeypatch, InBfloat16, shape, ALGORITHM_1, autocast=True, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", SOME)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: str, norm: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train_both_ways(monkeypatch, *NORMS[norm], ALGORITHM_1, loss=LOSSES[loss], device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [*SOME, "layer norm, several axes"])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_passes(
    backward: str, norm: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = BACKWARDS[backward]
    train_both_ways(monkeypatch, *NORMS[norm], ALGORITHM_1, backward=passes, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["images", "tokens"])
def test_a_gradient_that_lies_otherwise(
    norm: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expanded(model: nn.Module, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        return model(x).mean(-1).square().sum()

    train_both_ways(monkeypatch, *NORMS[norm], ALGORITHM_1, loss=expanded, device=device)


def test_training_and_evaluation_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_turns(model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x)
        model.train(not model.training)
        return loss

    train_both_ways(monkeypatch, *NORMS["images"], ALGORITHM_1, loss=in_turns)


def test_without_a_gradient_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_data(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x.detach())

    for norm in ("images", "tokens"):
        train_both_ways(monkeypatch, *NORMS[norm], ALGORITHM_1, loss=of_data)


@pytest.mark.parametrize("norm", [*SOME, "layer norm, several axes", "batch norm, no bias"])
@pytest.mark.parametrize("reading", ["Algorithm 1", "sign", "weights"])
def test_the_plainest_pass_needs_no_backward_of_python(
    norm: str, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in (BatchNorm, LayerNorm):
        monkeypatch.setattr(function, "backward", None)
    build, shape = NORMS[norm]
    model = Network(build)
    with WHERE[reading](model) as optimizer:
        for _ in range(2):
            square(model, torch.randn(shape)).backward()
            optimizer.step()


@pytest.mark.parametrize(("norm", "name"), [("images", "BatchNorm"), ("tokens", "LayerNorm")])
def test_nodes(norm: str, name: str) -> None:
    build, shape = NORMS[norm]
    model, x = build(), torch.randn(shape)
    with SVGD(model, LR):
        for _ in range(2):  # as it is looked at first, and as it is remembered
            sigma = model(x)
            assert sigma.grad_fn is not None and sigma.grad_fn.name() == NODE.format(name)
        with pytest.raises(ModelError, match="an optimizer attached"):
            virtual_grad(sigma.square().mean(), model.parameters(), operators.Sign())
        plain = copy.deepcopy(model)(x).grad_fn
        assert plain is not None and "virtualgrad" not in plain.name()


@pytest.mark.parametrize("norm", ["images", "tokens"])
def test_a_freed_graph_is_refused(norm: str) -> None:
    build, shape = NORMS[norm]
    model = Network(build)
    with SVGD(model, LR):
        loss = square(model, torch.randn(shape))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize("norm", ["images", "tokens"])
def test_a_graph_of_the_backward_pass_is_refused(norm: str) -> None:
    build, shape = NORMS[norm]
    model = Network(build)
    with SVGD(model, LR), pytest.raises(DoubleBackwardError, match="create_graph"):
        square(model, torch.randn(shape)).backward(create_graph=True)


@pytest.mark.parametrize("option", [{"training": 1}, {"momentum": None}])
def test_what_torch_refuses_it_refuses_still(option: dict[str, Any]) -> None:
    model = nn.BatchNorm1d(6)
    options = {"training": True, **option}
    with SVGD(model, LR), pytest.raises(TypeError, match="batch_norm"):
        F.batch_norm(torch.randn(ROWS), None, None, model.weight, model.bias, **options)
