"""suggest() and range_test() leave model, optimizers and random numbers as they were."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from virtualgrad import SVGD, range_test, suggest
from virtualgrad.errors import NonFiniteError

X, Y = torch.randn(40, 5), torch.randint(0, 3, (40,))
KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


class Restless(nn.Module):
    """Batch norm, dropout and a counter; draws from every generator."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        random.random()
        np.random.rand()
        return self.head(self.body(x))


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True)


def fingerprint(model, *optimizers):
    """Everything that could have changed."""
    return copy.deepcopy(
        (
            {name: tensor.clone() for name, tensor in model.state_dict().items()},
            [p.grad for p in model.parameters()],
            [optimizer.state_dict() for optimizer in optimizers],
            torch.get_rng_state(),
            torch.tensor(np.random.get_state()[1].astype("int64")),
            torch.tensor(random.getstate()[1]),
        )
    ), [(type(module), module.training) for module in model.modules()]


def same_bits(one, other):
    """Whether two nested values are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


def assert_same(before, after):
    assert same_bits(before[0], after[0])
    assert before[1] == after[1]


def trained(kind):
    """A model in the middle of its training, with gradients waiting."""
    model = Restless()
    optimizer = KINDS[kind](model.parameters())
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def calls(model, optimizer):
    return {
        "suggest": lambda: suggest(model, F.cross_entropy, loader(), current=optimizer, count=3),
        "range_test": lambda: range_test(
            model, F.cross_entropy, loader(), scales=(0.01, 0.1), steps=6
        ),
    }


@pytest.mark.parametrize("tool", ["suggest", "range_test"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes(kind, tool):
    model, optimizer = trained(kind)
    parameters, gradients = list(model.parameters()), [p.grad for p in model.parameters()]
    before = fingerprint(model, optimizer)
    calls(model, optimizer)[tool]()
    assert_same(before, fingerprint(model, optimizer))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))


@pytest.mark.parametrize("tool", ["suggest", "range_test"])
def test_an_attached_optimizer_stays_as_it_is(tool):
    model, optimizer = trained("sgd")
    svgd = SVGD(model, lr=0.1)
    F.cross_entropy(model(X), Y).backward()
    svgd.step()
    F.cross_entropy(model(X), Y).backward()  # prepared, not committed
    before = fingerprint(model, optimizer, svgd)
    calls(model, optimizer)[tool]()
    assert_same(before, fingerprint(model, optimizer, svgd))
    r = {key: tensors["r"].clone() for key, tensors in svgd.operator.state.items()}
    svgd.step()  # commits what was prepared before
    assert any(not torch.equal(r[key], t["r"]) for key, t in svgd.operator.state.items())


def test_attached_or_not_the_numbers_are_the_same():
    model, optimizer = trained("adam")
    batches = [(X[:10], Y[:10]), (X[10:20], Y[10:20])]
    plain = suggest(model, F.cross_entropy, batches, current=optimizer)
    with SVGD(model, lr=0.1):
        attached = suggest(model, F.cross_entropy, batches, current=optimizer)
    assert attached == plain


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes_where_the_loss_fails(training):
    model, optimizer = trained("adam")
    model.train(training)
    before = fingerprint(model, optimizer)
    with pytest.raises(NonFiniteError):
        suggest(model, F.cross_entropy, [(X, Y), (X * torch.nan, Y)], current=optimizer)
    with pytest.raises(NonFiniteError):
        range_test(model, F.cross_entropy, [(X * torch.nan, Y)], steps=3)
    assert_same(before, fingerprint(model, optimizer))


def test_gradients_switched_off_do_not_matter():
    model, optimizer = trained("sgd")
    with torch.no_grad():
        found = suggest(model, F.cross_entropy, [(X, Y)], current=optimizer)
        range_test(model, F.cross_entropy, [(X, Y)], steps=3)
    assert found == suggest(model, F.cross_entropy, [(X, Y)], current=optimizer)
