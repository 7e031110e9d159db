"""Ranges and what becomes of a value in them, in closed form."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tiny_lab import TINY, TinyNetwork
from torch import nn

from virtualgrad.lab.optimizers import OPTIMIZERS
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.sweep.spaces import LR, SPACES, Range, shortened, tuned, why_not


def test_a_range_is_even_in_the_logarithm():
    of = Range(1e-4, 1)
    assert of.decades == pytest.approx(4)
    assert [of.place(value) for value in (1e-4, 1e-3, 1e-2, 1)] == pytest.approx([0, 0.25, 0.5, 1])
    assert [of.at(place) for place in (0, 0.25, 0.5, 1)] == pytest.approx([1e-4, 1e-3, 1e-2, 1])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_ranges_hold_the_papers_settings(recipe):
    for name, column in recipe.optimizers.items():
        ranges = SPACES[name].ranges
        assert ranges[LR].low < column.lr[0] < ranges[LR].high
        assert all(ranges[k].low < value < ranges[k].high for k, value in column.options.items())


def test_all_ranges_are_equally_wide():
    widths = [of.decades for space in SPACES.values() for of in space.ranges.values()]
    assert widths == pytest.approx([4] * 8)


def test_phases_keep_the_ratios_of_the_recipe():
    found = tuned(RECIPES["resnet20"], "svgd", {"lr": 1.0, "scale": 0.3})
    assert found.method == "svgd" and found.options == {"scale": 0.3}
    assert found.lr == pytest.approx((1.0, 0.04, 0.02))
    momentum = tuned(RECIPES["mlp"], "sgd-momentum", {"lr": 0.02})
    assert momentum.method == "sgd-momentum" and momentum.lr == pytest.approx((0.02, 0.01, 0.002))


def test_the_recipes_own_settings_come_back():
    recipe = RECIPES["vgg"]
    for name, column in recipe.optimizers.items():
        found = tuned(recipe, name, {"lr": column.lr[0], **column.options})
        assert found.lr == pytest.approx(column.lr) and found.options == column.options


def test_shortened_keeps_the_shape_of_the_schedule():
    recipe = RECIPES["mlp"]
    assert shortened(recipe, None) is recipe
    short = shortened(recipe, 600)
    assert (short.steps, short.milestones, short.evaluate_every) == (600, (160, 360), 60)
    assert shortened(recipe, 5).evaluate_every == 1
    assert shortened(recipe, 60_000).evaluate_every == recipe.evaluate_every


class Deep(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))


def test_what_cannot_be_searched(monkeypatch):
    assert why_not(RECIPES["mlp"], "muon") is None and why_not(RECIPES["vgg"], "adamw") is None
    assert "no linear layer inside" in why_not(RECIPES["resnet20"], "muon")
    assert "has no svgd" in why_not(replace(TINY, optimizers={}), "svgd")
    monkeypatch.delitem(OPTIMIZERS, "muon")
    assert "no Muon" in why_not(RECIPES["mlp"], "muon")


def step_of(optimizer, model):
    torch.manual_seed(1)
    x, y = torch.rand(8, 16), torch.arange(8)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def a_model(network=Deep):
    torch.manual_seed(0)
    return network()


def test_muon_is_torchs_on_hidden_matrices_and_adamw_elsewhere():
    model = a_model()
    found = step_of(OPTIMIZERS["muon"](model, 0.01), model)
    twin = a_model()
    hidden = [twin[2].weight]
    others = [p for p in twin.parameters() if p is not hidden[0]]
    muon = torch.optim.Muon(hidden, 0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, 0.01)

    class Both:
        def zero_grad(self):
            twin.zero_grad()

        def step(self):
            muon.step(), adamw.step()

    for one, other in zip(found, step_of(Both(), twin), strict=True):
        assert torch.equal(one, other)


def test_muon_follows_the_learning_rate_and_its_state_comes_back():
    model, twin = a_model(), a_model()
    optimizer, copy = (OPTIMIZERS["muon"](m, 0.01) for m in (model, twin))
    step_of(optimizer, model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, before, step_of(optimizer, model)))
    twin.load_state_dict(model.state_dict())
    copy.load_state_dict(deepcopy(optimizer.state_dict()))  # torch would share the tensors
    assert {group["lr"] for group in copy.param_groups} == {0.0}
    for each in (optimizer, copy):
        for group in each.param_groups:
            group["lr"] = 0.02
    assert all(map(torch.equal, step_of(optimizer, model), step_of(copy, twin)))
    assert optimizer.step(lambda: 3.0) == 3.0


def test_muon_says_where_it_cannot_be_used():
    with pytest.raises(ValueError, match="no hidden matrix"):
        OPTIMIZERS["muon"](TinyNetwork(), 0.1)


def test_momentum_and_adamw_are_torchs():
    for name, twin in {
        "sgd-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    }.items():
        model, other = a_model(), a_model()
        found = step_of(OPTIMIZERS[name](model, 0.1), model)
        assert all(map(torch.equal, found, step_of(twin(other.parameters()), other)))
    assert math.isclose(SPACES["adamw"].ranges[LR].decades, 4)
