"""Layers that come to a model after its optimizer: a word about those that no step moves."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from virtualgrad import SVGD
from virtualgrad.optim.newcomers import EVERY, Newcomers


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: SVGD, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


def replaced(model: nn.Sequential) -> nn.Module:
    model[2] = nn.Linear(5, 3)
    return model[2]


def appended(model: nn.Sequential) -> nn.Module:
    model.append(nn.Linear(3, 3))
    return model[-1]


def deep_inside(model: nn.Sequential) -> nn.Module:
    model[0].weight = nn.Parameter(torch.randn(5, 4))
    return model[0]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replaced, "'2.weight', '2.bias' have"),
        (appended, "'3.weight', '3.bias' have"),
        (deep_inside, "'0.weight' has"),
    ],
    ids=["replaced", "appended", "a parameter"],
)
@pytest.mark.parametrize("before", [1, 3 * EVERY], ids=["soon", "late"])
def test_a_parameter_that_no_step_moves_is_told_of_once(
    change: Callable[[nn.Sequential], nn.Module], names: str, before: int
) -> None:
    model = network()
    optimizer = SVGD.released(model, 0.1, 0.01)
    train(model, optimizer, before)
    new = change(model)
    start = new.weight.detach().clone()
    with pytest.warns(UserWarning, match=f"{names} come to Sequential.*add_param_group") as told:
        train(model, optimizer, 5 if before == 1 else EVERY)
    assert len(told) == 1
    assert torch.equal(new.weight, start)
    optimizer.add_param_group(
        {"params": [p for p in new.parameters() if p is new.weight or "bias" in names]}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2 * EVERY)
    assert not torch.equal(new.weight, start)


def test_no_word_about_parameters_that_are_not_its_own_to_train() -> None:
    model = network()
    some = SVGD(model, 0.1, params=model[0].parameters())
    train(model, some, 2)  # the rest was left out on purpose
    model.append(nn.Linear(3, 3).requires_grad_(False))
    train(model, some, 2)
    head = appended(model)
    with SVGD(model, 0.1, params=head.parameters()) as other:
        for _ in range(EVERY):
            some.zero_grad(), other.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            some.step(), other.step()


def test_it_seldom_walks_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    monkeypatch.setattr(Newcomers, "_in", lambda *_: walks.append(1))
    model = network()
    newcomers = Newcomers(model)
    with SVGD(model, 0.1) as optimizer:
        for _ in range(1024):
            newcomers.look(model, optimizer._attached())
    assert len(walks) == 6 + 1024 // EVERY  # 1, 2, 4, ..., 32, then 64, 128, 192, ...


def test_a_compiled_step_does_not_look() -> None:
    """It would be compiled anew for every number of steps."""
    model = network()
    optimizer = SVGD.released(model, 0.1, 0.01)
    train(model, optimizer, 1)
    newcomers = optimizer._newcomers
    replaced(model)
    torch._dynamo.reset()
    torch.compile(newcomers.look, backend="eager", fullgraph=True)(model, optimizer._attached())
