"""Linear layers on tokens in compiled passes, where T is an op: the gradients of eager ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import ops_in_torch
import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    READINGS,
    assert_as_in_eager_passes,
    assert_so_with_a_bias_apart,
    under_autocast,
    watch,
)
from torch import Tensor, nn

from virtualgrad.operators import rms_op
from virtualgrad.virtual.tokens import run_by_tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

TOKENS = (5, 3)


@pytest.fixture
def by_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each op at a site was run by its tokens, as far as asked."""
    ops_in_torch.use(monkeypatch)
    yield watch(monkeypatch, run_by_tokens)
    torch._dynamo.reset()


def network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 8, bias=bias), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4, bias=bias))
    return nn.Sequential(*layers).double()


class Picked(nn.Module):
    """A layer on 4 rows out of 6 samples: how often each is there, nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        picked: Tensor = self.layer(torch.cat([x, x])[:4])
        return picked.tanh()


class Perceiver(nn.Module):
    """A layer whose input is a parameter: sigma has rows of both."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.Linear(8, 8)
        self.last = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.layer(self.latents.expand(len(x), -1, -1)) * self.last(x)
        return mixed.tanh()


class Vector(nn.Module):
    """A weight without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).tanh().unsqueeze(2).expand(-1, -1, 2, -1)
        return F.linear(hidden, self.weight)


@pytest.mark.parametrize(
    ("reading", "bias"),
    [*((reading, True) for reading in READINGS), ("algorithm 1", False), ("shared, stale", False)],
)
def test_as_in_eager_passes(reading: str, bias: bool, by_tokens: list[bool]) -> None:
    assert_as_in_eager_passes(network(bias=bias), TOKENS, **READINGS[reading])
    assert by_tokens[:3] == [True, False, True]  # both layers, and not the norm


@pytest.mark.parametrize("reading", ["algorithm 1", "shared, stale"])
@pytest.mark.parametrize("kind", [Picked, Perceiver, Vector])
def test_layers_of_other_kinds(kind: type[nn.Module], reading: str, by_tokens: list[bool]) -> None:
    torch.manual_seed(0)
    assert_as_in_eager_passes(kind().double(), TOKENS, **READINGS[reading])
    assert any(by_tokens)


def test_a_bias_of_another_group_goes_the_general_way(by_tokens: list[bool]) -> None:
    assert_so_with_a_bias_apart(network(), TOKENS, "0.bias")
    assert by_tokens[:3] == [False, False, True]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_of_both_is_frozen(frozen: str, by_tokens: list[bool]) -> None:
    model = network()
    model.get_submodule("0").get_parameter(frozen).requires_grad_(False)
    assert_as_in_eager_passes(model, TOKENS)
    assert by_tokens[:3] == [frozen == "bias", False, True]


@pytest.mark.parametrize("reading", ["algorithm 1", "stale", "shared, stale"])
def test_autocast_as_without_the_op(
    reading: str, by_tokens: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of autocast, rounded where it rounds."""
    model = network().float()
    x = torch.randn(6, 5, 3)

    found = under_autocast(copy.deepcopy(model), x, torch.float16, **READINGS[reading])
    assert by_tokens[:3] == [True, False, True]
    monkeypatch.setattr(rms_op, "is_usable", lambda device: False)
    biases = {number for number, (name, _) in enumerate(model.named_parameters()) if "bias" in name}
    plain = under_autocast(model, x, torch.float16, **READINGS[reading])
    for number, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert one.dtype == other.dtype == torch.float32
        # The op sums T(g) for a bias before it is rounded to float16.
        exact = 2**-11 if number in biases else 1e-6
        assert (one - other).norm() <= exact * one.norm()
