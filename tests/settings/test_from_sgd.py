"""SVGD.from_sgd: the paper's two rules, as the released reading."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD
from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.optim.svgd import SCALE_TIMES_LR


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("rates", "scale"), [((0.1, 0.001), 0.01), ((2.0, 0.02), 0.01), ((0.1,), 0.02), ((4.0,), 5e-4)]
)
def test_the_two_rules(rates, scale):
    (group,) = SVGD.from_sgd(network(), *rates).param_groups
    assert group["lr"] == rates[0]
    assert math.isclose(group["scale"], scale, rel_tol=1e-12)


def test_it_is_the_released_method_with_the_options_given():
    one, other = network(), network()
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    ruled = SVGD.from_sgd(one, 0.1, 0.01, weight_decay=0.1)
    released = SVGD.released(other, lr=0.1, scale=0.01 / 0.1, weight_decay=0.1)
    for _ in range(3):
        for model, optimizer in ((one, ruled), (other, released)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one[0].weight, network()[0].weight)


def test_the_default_is_what_the_papers_tables_say():
    svgd = [recipe.optimizers["svgd"] for recipe in RECIPES.values()]
    products = sorted(tuned.lr[0] * tuned.options["scale"] for tuned in svgd)
    assert products == pytest.approx([0.001, 0.002, 0.005])
    assert products[1] == pytest.approx(SCALE_TIMES_LR)  # the one in the middle
    ratios = [
        recipe.optimizers["sgd"].lr[0] / recipe.optimizers["rmsprop"].lr[0]
        for recipe in RECIPES.values()
    ]
    assert ratios == pytest.approx([100, 100, 100])


@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan, math.inf, "0.1", True])
@pytest.mark.parametrize("place", ["lr_sgd", "lr_rmsprop"])
def test_rates_must_be_above_zero(place, rate):
    rates = {"lr_sgd": 0.1, "lr_rmsprop": 0.001} | {place: rate}
    with pytest.raises(HyperparameterError, match=f"{place}={rate!r}.*> 0"):
        SVGD.from_sgd(network(), **rates)


@pytest.mark.parametrize("option", ["lr", "scale"])
def test_what_it_finds_cannot_be_given(option):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HyperparameterError, match=r"use SVGD\.released"):
        SVGD.from_sgd(model, 0.1, **{option: 0.1})
    assert type(model[0]) is nn.Linear  # not attached
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
