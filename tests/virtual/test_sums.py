"""Norms in compiled passes: the gradients of weight and bias by sums are those of eager passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiled_runs import trained, watch
from torch import nn

from virtualgrad.virtual.sums import run_by_sums

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "layer norm": lambda: nn.LayerNorm([4, 5, 5]),
    "layer norm without bias": lambda: nn.LayerNorm([5, 5], bias=False),
}
READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "stale": {"stale": True},
    "shared": {"share_positions": True},
}


IMAGE = (3, 5, 5)


@pytest.fixture
def by_sums(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each op at a site was run by its sums, as far as asked."""
    return watch(monkeypatch, run_by_sums)


def network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), NORMS[norm](), nn.Tanh()
    ).double()


@pytest.mark.parametrize("reading", READINGS)
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
    eager = trained(copy.deepcopy(model), IMAGE, False)
    for one, other in zip(eager, trained(model, IMAGE, True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
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
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        bias = named.pop("1.bias")
        return [{"params": list(named.values())}, {"params": [bias], "scale": 0.5}]

    model = network("batch norm")
    twin = copy.deepcopy(model)
    eager = trained(twin, IMAGE, False, params=groups(twin))
    for one, other in zip(eager, trained(model, IMAGE, True, params=groups(model)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert not any(by_sums)
