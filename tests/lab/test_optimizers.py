"""The baselines against their formulas, and what each keeps in memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad.lab.networks import MLP
from virtualgrad.lab.optimizers import OPTIMIZERS, TensorFlowRMSProp, state_bytes


def test_rmsprop_by_hand():
    """q starts at 1; eps, made large here, stands inside the root."""
    lr, rho, eps = 0.1, 0.9, 0.5
    theta, q = [2.0, -3.0], [1.0, 1.0]
    weight = nn.Parameter(torch.tensor(theta, dtype=torch.float64))
    unused = nn.Parameter(torch.ones(1))
    optimizer = TensorFlowRMSProp([weight, unused], lr, rho, eps)
    for step in range(5):
        gradient = [2 * theta[0] + step, math.sin(theta[1])]
        for i, g in enumerate(gradient):
            q[i] = rho * q[i] + (1 - rho) * g * g
            theta[i] -= lr * g / math.sqrt(q[i] + eps)
        optimizer.zero_grad()
        (weight[0] ** 2 + step * weight[0] - torch.cos(weight[1])).backward()
        optimizer.step()
        assert weight.tolist() == pytest.approx(theta, rel=1e-12)
    assert unused.item() == 1


def test_rmsprop_defaults_and_closure():
    weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = TensorFlowRMSProp([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = 3 * weight
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3
    assert weight.item() == pytest.approx(1 - 0.1 * 3 / math.sqrt(0.9 + 0.1 * 9 + 1e-10), rel=1e-12)


PARAMETERS = 245_482
ROWS = 256 + 128 + 64 + 32 + 10  # r has one entry per output of each linear layer


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("sgd", 0), ("rmsprop", PARAMETERS), ("adam", 2 * PARAMETERS), ("svgd", ROWS)],
)
def test_memory_of_the_state(name, numbers):
    model = MLP()
    optimizer = OPTIMIZERS[name](model, 0.01, **({"scale": 0.1} if name == "svgd" else {}))
    F.cross_entropy(model(torch.rand(8, 784)), torch.arange(8)).backward()
    optimizer.step()
    assert state_bytes(optimizer) == 4 * numbers
