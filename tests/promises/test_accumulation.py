"""Promise 2: gradients of micro-batches add up to the step of one large batch.

The oracle is Algorithm 1 in plain code, sample by sample, on the whole batch: it uses nothing of
virtualgrad. ``loss / k`` over k micro-batches is the mean of their means: a sample of an uneven
one has another weight in it, and the oracle takes that loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import EPS, LR, RHO, SCALE, assert_trained_alike

from virtualgrad import SVGD

STEPS = 4
SPLITS = {
    "one": [12],
    "even": [4, 4, 4],
    "uneven last": [5, 5, 2],
    "a last sample": [6, 5, 1],
    "all uneven": [1, 7, 4],
}
Data = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def batches() -> list[Data]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(12, 5, generator=generator).double(),
            torch.randint(0, 3, (12,), generator=generator),
        )
        for _ in range(STEPS)
    ]


class LargeBatch:
    """Algorithm 1 on the whole batch; ``sizes`` only say what each sample weighs in the loss.

    With r updated first, T of a micro-batch goes by the r that it and those before it would make.
    """

    def __init__(self, model: nn.Sequential, *, per_sample: bool, stale: bool) -> None:
        self.model, self.per_sample, self.stale = copy.deepcopy(model), per_sample, stale
        self.layers = [layer for layer in self.model if isinstance(layer, nn.Linear)]
        self.r = {layer: torch.zeros(layer.out_features).double() for layer in self.layers}

    def step(self, batch: Data, sizes: list[int]) -> None:
        seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in self.layers}
        for size, x, y in zip(sizes, *(part.split(sizes) for part in batch), strict=True):
            for sample in range(size):
                self._look(x[sample], y[sample], 1 / (len(sizes) * size), seen)
        for layer in self.layers:
            old, pairs = self.r[layer], seen[layer]
            gradient = torch.zeros_like(layer.weight), torch.zeros_like(layer.bias)
            begin = 0
            for size in sizes:
                end = begin + size
                r = old if self.stale else self._updated(old, pairs[:end])
                for g, x in pairs[begin:end]:
                    t = SCALE * g / torch.sqrt(r + EPS)
                    gradient[0].add_(torch.outer(t, x))
                    gradient[1].add_(t)
                begin = end
            self.r[layer] = self._updated(old, pairs)
            with torch.no_grad():
                layer.weight -= LR * gradient[0]
                layer.bias -= LR * gradient[1]

    def _look(self, x: Tensor, y: Tensor, weight: float, seen: dict[nn.Module, Any]) -> None:
        value, places = x, []
        for layer in self.model:
            before = value
            value = layer(value)
            if layer in seen:
                places.append((layer, value, before.detach()))
        loss = weight * F.cross_entropy(value, y)
        gradients = torch.autograd.grad(loss, [sigma for _, sigma, _ in places])
        for (layer, _, before), g in zip(places, gradients, strict=True):
            seen[layer].append((g, before))

    def _updated(self, old: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        unit = len(pairs) if self.per_sample else 1
        mean = torch.stack([(unit * g).square() for g, _ in pairs]).mean(0)
        return RHO * old + (1 - RHO) * mean


def accumulate(model: Callable[[Tensor], Tensor], batch: Data, sizes: list[int]) -> None:
    for x, y in zip(*(part.split(sizes) for part in batch), strict=True):
        (F.cross_entropy(model(x), y) / len(sizes)).backward()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("stale", [True, False], ids=["r of before", "r updated first"])
@pytest.mark.parametrize("per_sample", [True, False], ids=["per sample", "per batch"])
def test_micro_batches_by_algorithm_one(split: str, stale: bool, per_sample: bool) -> None:
    """With the r of before this is the step of the large batch: the oracle has no micro-batches.

    With r updated first it is the large batch's r, and T as ``LargeBatch`` says.
    """
    sizes, model = SPLITS[split], network().double()
    start, oracle = copy.deepcopy(model), LargeBatch(model, per_sample=per_sample, stale=stale)
    optimizer = SVGD(model, LR, scale=SCALE, per_sample=per_sample, stale=stale)
    for batch in batches():
        optimizer.zero_grad()
        accumulate(model, batch, sizes)
        optimizer.step()
        oracle.step(batch, sizes)
    assert_trained_alike(model, oracle.model, start)
    found = [state["r"] for _, state in sorted(optimizer.operator.state.items())]
    for kept, r in zip(found, oracle.r.values(), strict=True):
        torch.testing.assert_close(kept, r, rtol=1e-10, atol=0)


@pytest.mark.parametrize("stale", [True, False], ids=["r of before", "r updated first"])
def test_where_the_order_of_micro_batches_matters(stale: bool) -> None:
    """It must not for a sum over a batch, and does not with the r of before."""
    found = []
    for reverse in (False, True):
        model = network().double()
        optimizer = SVGD(model, LR, scale=SCALE, stale=stale)
        for x, y in batches():
            optimizer.zero_grad()
            order = torch.arange(12).flip(0) if reverse else torch.arange(12)
            accumulate(model, (x[order], y[order]), [4, 4, 4])
            optimizer.step()
        found.append(torch.cat([p.flatten() for p in model.parameters()]))
    difference = (found[0] - found[1]).norm() / found[0].norm()
    assert difference < 1e-10 if stale else difference > 1e-4


def test_no_setting_says_how_many_micro_batches_there_are() -> None:
    """Their number may change from step to step."""
    model = network().double()
    oracle = LargeBatch(model, per_sample=True, stale=True)
    optimizer = SVGD(model, LR, scale=SCALE, stale=True)
    for batch, sizes in zip(batches(), ([12], [3, 3, 3, 3], [7, 5], [1] * 12), strict=True):
        optimizer.zero_grad()
        accumulate(model, batch, sizes)
        optimizer.step()
        oracle.step(batch, sizes)
    assert_trained_alike(model, oracle.model)
