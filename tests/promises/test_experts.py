"""Mixtures of experts: some get many rows, some get none.

Rows that a router picks have no known order, so their number decides how r is read unless it is
shared over positions, as the README advises for such models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD

BATCH, LENGTH, WIDTH, EXPERTS = 6, 3, 4, 4


class Experts(nn.Module):
    """Each row goes to one expert: a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 3)

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return self.experts[number](rows)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        mixed = torch.zeros_like(rows)
        for number in self.order(choice):
            picked = (choice.flatten() == number).nonzero().squeeze(1)
            mixed = mixed.index_add(0, picked, torch.tanh(self.expert(number, rows[picked])))
        return self.head(mixed.view(x.shape)).mean(1)

    def order(self, choice: Tensor) -> list[int]:
        return list(range(EXPERTS))  # an expert without rows runs all the same


class HitExperts(Experts):
    """Experts without rows do not run."""

    def order(self, choice: Tensor) -> list[int]:
        return sorted(set(choice.flatten().tolist()))


class StackedExperts(HitExperts):
    """All experts in one parameter, as in transformers; those without rows do not run."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weights[number])


class StackedByTensor(StackedExperts):
    """The same with a tensor as number, which is a view for torch, too."""

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weights[torch.tensor(number)])


def choices(steps: int) -> list[Tensor]:
    """Who goes where; from step to step other experts get nothing."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for step in range(steps):
        choice = torch.randint(0, EXPERTS, (BATCH, LENGTH), generator=generator)
        choice[choice == step % EXPERTS] = (step + 1) % EXPERTS
        result.append(choice)
    return result


@pytest.mark.parametrize("make", [Experts, HitExperts, StackedExperts, StackedByTensor])
def test_experts_train_as_by_the_recorded_graph(make: Callable[[], Experts]) -> None:
    torch.manual_seed(0)
    model = make().double()
    start, twin = copy.deepcopy(model), Twin(model, share_positions=True)
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    for choice in choices(6):
        x, y = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(0, 3, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x, choice), y).backward()
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x, choice), y), BATCH)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)


@pytest.mark.parametrize(
    ("make", "modules"),
    [
        (HitExperts, Experts),  # to run without rows is not to run
        (StackedExperts, HitExperts),
        (StackedByTensor, HitExperts),
    ],
)
def test_experts_train_alike_however_they_are_stored(
    make: Callable[[], Experts], modules: Callable[[], Experts]
) -> None:
    """A module has a name, and so an r, of its own; a slice has where it begins.

    The recorded graph is no oracle here: it tells slices apart in the same way.
    """
    torch.manual_seed(0)
    model, reference = make().double(), modules().double()
    start = weights_of(reference)
    with torch.no_grad():
        weights_of(model, start)
        model.head.load_state_dict(reference.head.state_dict())
    pairs = [(m, SVGD(m, LR, scale=SCALE, share_positions=True)) for m in (model, reference)]
    for choice in choices(6):
        x, y = torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randint(0, 3, (BATCH,))
        for m, optimizer in pairs:
            optimizer.zero_grad()
            F.cross_entropy(m(x, choice), y).backward()
            optimizer.step()
    found, expected = weights_of(model), weights_of(reference)
    assert (expected - start).flatten(1).norm(dim=1).min() > 1e-3  # every expert has moved
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def weights_of(model: Experts, values: Tensor | None = None) -> Tensor:
    """All experts' weights in one tensor, after setting them where values are given."""
    stacked = isinstance(model, StackedExperts)
    each = list(model.weights if stacked else (expert.weight for expert in model.experts))
    for weight, value in zip(each, () if values is None else values, strict=False):
        weight.copy_(value)
    return torch.stack(each).detach().clone()
