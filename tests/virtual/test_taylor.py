r"""The paper's Taylor equation: sigma and f(theta) stay together up to O(alpha^2).

theta' = theta - alpha v and sigma' = sigma - alpha M v, where v is the virtual gradient and M the
Jacobian of f. For a linear f sigma' = f(theta'); otherwise halving alpha quarters the distance.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from virtualgrad import operators, virtual_grad


def distance(f: object, theta: Tensor, alpha: float) -> float:
    """|sigma' - f(theta')| after one step of size alpha."""
    leaf = theta.clone().requires_grad_()
    sigma = f(leaf)  # type: ignore[operator]
    loss = (sigma.sin() + sigma.square()).sum()
    (v,) = virtual_grad(loss, [leaf], operators.RMS(scale=2.0))
    jacobian = torch.func.jacrev(f)(theta)  # type: ignore[arg-type]
    moved = sigma.detach() - alpha * torch.tensordot(jacobian, v, dims=v.dim())
    return float((moved - f(theta - alpha * v)).norm())  # type: ignore[operator]


def test_a_linear_map_keeps_sigma_and_f_of_theta_together() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 4, dtype=torch.float64)
    theta = torch.randn(4, 3, dtype=torch.float64)
    assert distance(lambda w: x @ w, theta, 0.1) < 1e-13


def test_a_nonlinear_map_loses_a_quarter_when_alpha_is_halved() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 4, dtype=torch.float64)
    theta = torch.randn(4, 4, dtype=torch.float64)

    def two_uses(w: Tensor) -> Tensor:  # each use is linear, both together are not
        return torch.tanh(x @ w) @ w

    errors = [distance(two_uses, theta, 1e-3 / 2**k) for k in range(4)]
    for larger, smaller in pairwise(errors):
        assert abs(larger / smaller - 4) < 0.05
