"""Checkpoints in a compiled model run uncompiled, in both variants, and again in each backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD

BATCH, WIDTH = 5, 4

pytestmark = [
    pytest.mark.usefixtures("double_precision", "fresh_compiler"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch
]


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """What a backward pass leaves in cycles stays there: it must not count, for all that."""
    gc.disable()
    yield
    gc.enable()


class Model(nn.Module):
    """A layer and a method under checkpoints, or under none, between others."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if self.reentrant is None:
            return self.last(self.method(torch.tanh(self.middle(x))))
        x = torch.tanh(checkpoint(self.middle, x, use_reentrant=self.reentrant))
        return self.last(checkpoint(self.method, x, use_reentrant=self.reentrant))

    def method(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(x) @ self.matrix)


def trained(reentrant: bool | None, compiled: bool, micro: int) -> tuple[nn.Module, set[str]]:
    torch.manual_seed(0)
    model = Model(reentrant)
    optimizer = SVGD(model, 0.05, scale=0.3, stale=micro > 1)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(micro):
            ((run(torch.randn(BATCH, WIDTH)) - 1).square().mean() / micro).backward()
        optimizer.step()
    state = optimizer.state_dict()["state"].values()
    return model, {key for each in state for key in each if key.startswith("r@")}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_as_eager_without(reentrant: bool, micro: int) -> None:
    found, keys = trained(reentrant, True, micro)
    expected, expected_keys = trained(None, False, micro)
    assert keys == expected_keys
    for (name, one), its in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, its, rtol=1e-10, atol=1e-13, msg=name)
