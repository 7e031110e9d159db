"""What an optimizer does with a gradient, against the optimizer itself."""

import math

import pytest
import torch
from torch import nn

from virtualgrad import SVGD
from virtualgrad.errors import HyperparameterError
from virtualgrad.settings import SettingsError
from virtualgrad.settings.current import read_current

GRADIENT = torch.tensor([0.3, -0.02, 0.5], dtype=torch.float64)

CASES = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "alpha": 0.9, "eps": 0.01}),
    (torch.optim.Adam, {"lr": 0.003}),
    (torch.optim.AdamW, {"lr": 0.003, "eps": 0.1, "weight_decay": 0.0}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_step_is_that_of_a_long_run_with_one_gradient(kind, options):
    """With the same g in every step, a step of the long run is all that one g moves."""
    theta = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = kind([theta], **options)
    for _ in range(4000):
        before = theta.detach().clone()
        theta.grad = GRADIENT.clone()
        optimizer.step()
    moved = float(torch.linalg.vector_norm(theta.detach() - before))
    current = read_current(optimizer, {"theta": theta})
    # rel: beta2 = 0.999 has not quite forgotten its start after 4,000 steps
    assert current.step_size("theta", GRADIENT.square()) == pytest.approx(moved, rel=1e-6)


def test_groups_keep_their_rates():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.4}]
    current = read_current(torch.optim.SGD(groups, momentum=0.5), {"a": a, "b": b})
    assert current.rates == {"a": 0.2, "b": 0.8}
    assert any("different learning rates" in note for note in current.notes)


@pytest.mark.parametrize(
    ("kind", "options", "decay"),
    [
        (torch.optim.SGD, {"weight_decay": 0.0}, None),
        (torch.optim.SGD, {"weight_decay": 0.01, "momentum": 0.9}, 0.01 * 0.1 / (1 - 0.9)),
        (torch.optim.AdamW, {"weight_decay": 0.2}, 0.2 * 0.1),
        (torch.optim.Adam, {"weight_decay": 0.2}, None),
        (torch.optim.RMSprop, {"weight_decay": 0.2}, None),
    ],
)
def test_weight_decay_is_what_a_step_takes_away(kind, options, decay):
    theta = nn.Parameter(torch.ones(1))
    current = read_current(kind([theta], lr=0.1, **options), {"theta": theta})
    assert current.decay == (None if decay is None else pytest.approx(decay))
    told = any("weight_decay" in note for note in current.notes)
    assert told == (decay is None and options["weight_decay"] > 0)


def test_an_optimizer_that_is_not_known():
    model = nn.Linear(2, 2)
    for optimizer in (torch.optim.Adagrad(model.parameters()), SVGD(model, lr=0.1), None, "adam"):
        with pytest.raises(SettingsError, match=r"an optimizer of torch\.optim: SGD, RMSprop"):
            read_current(optimizer, dict(model.named_parameters()))


def test_an_optimizer_of_another_model():
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="without a trainable parameter of this model"):
        read_current(other, dict(nn.Linear(2, 2).named_parameters()))


@pytest.mark.parametrize("lr", [0.0, math.inf])
def test_a_rate_that_says_nothing(lr):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = lr  # as the first step of a warm-up sets it
    with pytest.raises(HyperparameterError, match=f"Adam with lr={lr:g}.*after warm-up"):
        read_current(optimizer, dict(model.named_parameters()))
