"""Convolutions of images in compiled passes, where the weight gradient is an op: as eager ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import ops_in_torch
import pytest
import torch
from compiled_runs import (
    READINGS,
    assert_as_in_eager_passes,
    assert_so_with_a_bias_apart,
    trained,
    under_autocast,
    watch,
)
from torch import Tensor, nn

from virtualgrad.operators import weights_op
from virtualgrad.virtual.images import run_by_images

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

IMAGE = (3, 9, 8)
BY_IMAGES = [reading for reading in READINGS if reading != "shared"]  # which goes the general way


@pytest.fixture
def by_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each op at a site was run by its images, as far as asked."""
    ops_in_torch.use(monkeypatch)
    yield watch(monkeypatch, run_by_images)
    torch._dynamo.reset()


def network(*, bias: bool = True, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        *(nn.Conv2d(3, 4, 3, bias=bias, **options), nn.Tanh(), nn.BatchNorm2d(4)),
        nn.Conv2d(4, 5, (2, 1), stride=(1, 2), padding=(0, 1), dilation=(2, 1), bias=bias),
    )
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("reading", "bias"),
    [*((reading, True) for reading in BY_IMAGES), ("algorithm 1", False), ("shared, stale", False)],
)
def test_as_in_eager_passes(reading: str, bias: bool, by_images: list[bool]) -> None:
    assert_as_in_eager_passes(network(bias=bias), IMAGE, **READINGS[reading])
    assert by_images[:3] == [True, False, True]  # both convolutions, and not the norm


@pytest.mark.parametrize(
    "options", [{"padding": "same"}, {"groups": 1, "padding": "valid"}], ids=str
)
def test_paddings_by_name_go_the_general_way(
    options: dict[str, Any], by_images: list[bool]
) -> None:
    assert_as_in_eager_passes(network(**options), IMAGE)
    assert by_images[:3] == [False, False, True]


def test_groups_go_the_general_way(by_images: list[bool]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Tanh(), nn.Conv2d(6, 2, 1)).double()
    assert_as_in_eager_passes(layers.to(memory_format=torch.channels_last), IMAGE)  # type: ignore[call-overload]
    assert by_images[:2] == [False, True]


def test_r_that_is_shared_and_updated_first_goes_the_general_way(by_images: list[bool]) -> None:
    assert_as_in_eager_passes(network(), IMAGE, share_positions=True)
    assert not any(by_images)


def test_images_that_lie_otherwise_go_the_general_way(by_images: list[bool]) -> None:
    model = network().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    assert_as_in_eager_passes(model, IMAGE)
    assert not any(by_images)


def test_a_bias_of_another_group_goes_the_general_way(by_images: list[bool]) -> None:
    assert_so_with_a_bias_apart(network(), IMAGE, "0.bias")
    assert by_images[:3] == [False, False, True]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_one_of_both_is_frozen(frozen: str, by_images: list[bool]) -> None:
    model = network()
    model.get_submodule("0").get_parameter(frozen).requires_grad_(False)
    assert_as_in_eager_passes(model, IMAGE, **READINGS["stale"])
    assert by_images[:3] == [frozen == "bias", False, True]


class Overwritten(nn.Module):
    """The input of a convolution is changed behind it, where no graph of its own would notice."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.layer, self.keeps = nn.Conv2d(3, 4, 3), keeps

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        out: Tensor = self.layer(x.clone() if self.keeps else x)
        x.mul_(3)
        return out + x.mean()


def test_an_input_that_is_overwritten_later(by_images: list[bool]) -> None:
    """Eager passes are refused there; a compiled one has kept what it was."""
    found = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = Overwritten(keeps=keeps).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        found.append(trained(model, IMAGE, not keeps, stale=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert by_images[0]


@pytest.mark.parametrize("reading", ["algorithm 1", "stale", "shared, stale"])
def test_autocast_as_without_the_op(
    reading: str, by_images: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the dtype of autocast, rounded where it rounds."""
    model = network().float()
    x = torch.randn(6, *IMAGE).to(memory_format=torch.channels_last)

    found = under_autocast(copy.deepcopy(model), x, torch.bfloat16, **READINGS[reading])
    assert by_images[:3] == [True, False, True]
    monkeypatch.setattr(weights_op, "is_usable", lambda device, dtype: False)
    plain = under_autocast(model, x, torch.bfloat16, **READINGS[reading])
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() <= 2**-6 * one.norm()
