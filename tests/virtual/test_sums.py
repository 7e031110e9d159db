"""Norms in compiled passes: the gradients of weight and bias by sums are those of eager passes."""

from __future__ import annotations

import copy
from typing import Any

import ops_in_torch
import pytest
import torch
from compiled_runs import (
    READINGS,
    assert_as_in_eager_passes,
    assert_so_with_a_bias_apart,
    backward_graphs,
    trained,
    watch,
)
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators import rms_op, weights_op
from virtualgrad.virtual.sums import run_by_sums

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer norm": lambda: nn.LayerNorm([4, 5, 5]),
    "layer norm without bias": lambda: nn.LayerNorm([5, 5], bias=False),
}
IMAGE = (3, 5, 5)
THREE_READINGS = ("algorithm 1", "stale", "shared")


@pytest.fixture
def by_sums(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each op at a site was run by its sums, as far as asked."""
    return watch(monkeypatch, run_by_sums)


def network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), NORMS[norm](), nn.Tanh()
    ).double()


@pytest.mark.parametrize("reading", THREE_READINGS)
@pytest.mark.parametrize("norm", NORMS)
def test_as_in_eager_passes(norm: str, reading: str, by_sums: list[bool]) -> None:
    model = network(norm)
    eager = trained(copy.deepcopy(model), IMAGE, False, **READINGS[reading])
    assert not by_sums
    for one, other in zip(eager, trained(model, IMAGE, True, **READINGS[reading]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert any(by_sums)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_of_both_is_frozen(frozen: str, by_sums: list[bool]) -> None:
    model = network("batch norm")
    model.get_submodule("1").get_parameter(frozen).requires_grad_(False)
    assert_as_in_eager_passes(model, IMAGE)
    assert any(by_sums)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_in_bfloat16(training: bool, by_sums: list[bool]) -> None:
    model = network("batch norm").bfloat16().train(training)
    eager = trained(copy.deepcopy(model), IMAGE, False)
    for one, other in zip(eager, trained(model, IMAGE, True), strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert (one - other).norm() <= 2**-6 * one.norm()
    assert any(by_sums)


def test_weight_and_bias_of_different_groups_go_the_general_way(by_sums: list[bool]) -> None:
    assert_so_with_a_bias_apart(network("batch norm"), IMAGE, "1.bias")
    assert not any(by_sums)


def images(norm: str = "batch norm") -> nn.Module:
    """A network of channels-last images."""
    return network(norm).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.fixture
def by_ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that were called, by their names; plain torch stands in for them."""
    ops_in_torch.use(monkeypatch)
    called: list[str] = []

    @settled_while_tracing
    def note(name: str) -> None:
        called.append(name)

    def transform(*args: Any, **kwargs: Any) -> Any:
        note("transform")
        return ops_in_torch.transform(*args, **kwargs)

    def norm_sums(*args: Any) -> Tensor:
        note("norm_sums")
        return ops_in_torch.norm_sums(*args)

    monkeypatch.setattr(rms_op, "transform", transform)
    monkeypatch.setattr(rms_op, "norm_sums", norm_sums)
    return called


@pytest.mark.parametrize(
    ("reading", "ops"),
    [("algorithm 1", {"transform", "norm_sums"}), ("stale", {"norm_sums"}), ("shared", set())],
)
def test_channels_last_images_by_ops(
    reading: str, ops: set[str], by_ops: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no op makes the weight's gradient of a convolution (tests/virtual/test_images.py)."""
    monkeypatch.setattr(weights_op, "is_usable", lambda device, dtype: False)
    model = images()
    eager = trained(copy.deepcopy(model), IMAGE, False, **READINGS[reading])
    assert not by_ops
    for one, other in zip(eager, trained(model, IMAGE, True, **READINGS[reading]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert set(by_ops) == ops


@pytest.mark.parametrize("changed", ["eval", "no bias", "contiguous", "group norm"])
def test_other_norms_not_by_the_op(changed: str, by_ops: list[str]) -> None:
    model = images(changed if changed in NORMS else "batch norm").train(changed != "eval")
    if changed == "contiguous":
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    if changed == "no bias":
        model.get_submodule("1").get_parameter("bias").requires_grad_(False)
    assert_as_in_eager_passes(model, IMAGE)
    assert "norm_sums" not in by_ops


@pytest.mark.parametrize("reading", THREE_READINGS)
def test_images_keep_their_layout_in_compiled_passes(reading: str, by_ops: list[str]) -> None:
    """Asked for strides in a backward pass, torch.compile makes every g contiguous: a copy each."""
    torch._dynamo.reset()
    model = nn.Sequential(*images(), *images()[1:])
    optimizer = SVGD(model, 1e-2, **READINGS[reading])
    graphs, backend = backward_graphs()
    x = torch.randn(6, *IMAGE, dtype=torch.float64).to(memory_format=torch.channels_last)
    torch.compile(model, backend=backend, fullgraph=True)(x).square().mean().backward()
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes]
    large = [v for v in values if isinstance(v, Tensor) and v.shape == (6, 4, 5, 5)]
    assert large
    assert all(v.is_contiguous(memory_format=torch.channels_last) for v in large)
    optimizer.step()
    assert optimizer.operator.state
    assert ("norm_sums" in by_ops) is (reading != "shared")


class Overwriting(nn.Module):
    """A norm of the model's input, or of a copy of it, which is overwritten afterwards."""

    def __init__(self, norm: nn.Module, copies: bool) -> None:
        super().__init__()
        self.norm, self.copies = norm, copies

    def forward(self, x: Tensor) -> Tensor:
        if self.copies:
            x = x * 1.0
        y: Tensor = self.norm(x)
        x.mul_(3)
        return y + x.sum()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("norm", ["batch norm", "layer norm"])
def test_an_input_that_is_overwritten_is_noticed(
    norm: str, copies: bool, by_ops: list[str]
) -> None:
    torch._dynamo.reset()
    model = Overwriting(NORMS[norm]().double(), copies)
    x = torch.randn(6, 4, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    with SVGD(model, 1e-2), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).mean().backward()
    assert not by_ops


class OverwritingInside(nn.Module):
    """A convolution's sigma, normalized, and then overwritten; or a new tensor in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.in_place = True

    def forward(self, x: Tensor) -> Tensor:
        sigma = self.conv(x)
        y: Tensor = self.norm(sigma)
        sigma = sigma.mul_(3) if self.in_place else sigma * 3
        return y.tanh() + sigma.sum()


def test_an_input_that_is_overwritten_is_kept_for_the_op(by_ops: list[str]) -> None:
    """Plain torch refuses it; the op has the value that was normalized, and not what came after."""
    torch._dynamo.reset()
    x = torch.randn(6, *IMAGE, dtype=torch.float64).to(memory_format=torch.channels_last)
    model = OverwritingInside().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    twin = copy.deepcopy(model)
    twin.in_place = False
    for one, backend in ((model, "aot_eager"), (twin, None)):
        with SVGD(one, 1e-2):
            run = one if backend is None else torch.compile(one, backend=backend, fullgraph=True)
            run(x).pow(3).mean().backward()
    assert "norm_sums" in by_ops
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_an_empty_batch_teaches_nothing(order: torch.memory_format, by_ops: list[str]) -> None:
    model = images().to(memory_format=order)  # type: ignore[call-overload]
    torch._dynamo.reset()
    optimizer = SVGD(model, 1e-2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    for samples in (6, 0, 6):
        before = {key: kept["r"].clone() for key, kept in optimizer.operator.state.items()}
        x = torch.randn(samples, *IMAGE, dtype=torch.float64).to(memory_format=order)
        optimizer.zero_grad()
        run(x).pow(3).sum().backward()
        optimizer.step()
        same = [torch.equal(before[key], optimizer.operator.state[key]["r"]) for key in before]
        assert all(same) if samples == 0 else not any(same)
    assert bool(by_ops) is (order is torch.channels_last)


def test_one_channel(by_sums: list[bool]) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 1, 3, bias=False), nn.BatchNorm2d(1), nn.Tanh())
    model = nn.Sequential(*layers).double()
    assert_as_in_eager_passes(model, IMAGE)
    assert any(by_sums)
