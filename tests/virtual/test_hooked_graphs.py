"""Hooks that alter gradients: T gets what a hook on sigma has made of g, and a hook on a parameter
gets the virtual gradient, once. In both encapsulations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD, Site, operators, virtual_grad

SCALE, BATCH = 0.3, 5
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])

pytestmark = pytest.mark.usefixtures("double_precision")


class Network(nn.Module):
    """Parameters that reach their ops directly, through a view, and through several views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.randn(4))
        self.hook: Callable[[Tensor], Tensor] | None = None
        self.hook_on_view: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(self.first(x))
        row = self.shift.unsqueeze(0)
        if self.hook_on_view is not None:
            row.register_hook(self.hook_on_view)
        x = torch.tanh(x * row) + row
        return self.hooked(self.last(x) + self.shift[:2])

    def hooked(self, x: Tensor) -> Tensor:
        if self.hook is not None:
            x.register_hook(self.hook)
        return x


def on_sigma(model: Network) -> None:
    model.hook = lambda g: g.clamp(-0.01, 0.01)


def on_layer(model: Network) -> None:
    model.last.register_full_backward_hook(lambda layer, g, _: (g[0] * 3,))


def on_nodes(model: Network) -> None:
    def hooked(layer: nn.Module, args: Any, sigma: Tensor) -> None:
        sigma.grad_fn.register_prehook(lambda g: (g[0].clamp(-0.01, 0.01),))

    model.first.register_forward_hook(hooked)
    model.last.register_forward_hook(hooked)


def on_parameters(model: Network) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda g: torch.sign(g) + g)


def on_view(model: Network) -> None:
    model.hook_on_view = lambda g: g * MASK


@pytest.mark.parametrize("hook", [on_sigma, on_layer, on_nodes, on_parameters, on_view])
def test_encapsulations_agree_under_hooks(hook: Callable[[Network], None]) -> None:
    by_ops = Network()
    by_topology, unhooked = copy.deepcopy(by_ops), copy.deepcopy(by_ops)
    hook(by_ops)
    hook(by_topology)
    optimizer = SVGD(by_ops, 0.1, scale=SCALE)
    x = torch.randn(BATCH, 3)
    for _ in range(3):  # the later ones as remembered
        optimizer.zero_grad()
        (by_ops(x) - 1).square().mean().backward()
    (found, plain) = (
        virtual_grad(
            (model(x) - 1).square().mean(),
            model.named_parameters(),
            operators.RMS(scale=SCALE),
            batch_size=BATCH,
        )
        for model in (by_topology, unhooked)
    )
    for (name, parameter), gradient in zip(by_ops.named_parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13, msg=name)
    assert not all(torch.allclose(*pair) for pair in zip(found, plain, strict=True))


def test_t_gets_what_a_hook_has_made_of_g() -> None:
    """At a layer below which there are others, too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    sigma = model(torch.randn(BATCH, 3))
    sigma.register_hook(lambda g: g * 10)
    seen = {}

    def operator(g: Tensor, site: Site) -> Tensor:
        seen[site.parameters] = g
        return g

    virtual_grad(sigma.sum(), model.named_parameters(), operator, batch_size=BATCH)
    torch.testing.assert_close(seen["2.bias", "2.weight"], torch.full((BATCH, 2), 10.0))


def test_identity_is_the_gradient_under_hooks() -> None:
    model = Network()
    for hook in (on_sigma, on_layer, on_nodes, on_parameters, on_view):
        hook(model)
    x = torch.randn(BATCH, 3)
    plain = torch.autograd.grad((model(x) - 1).square().mean(), list(model.parameters()))
    found = virtual_grad(
        (model(x) - 1).square().mean(), model.named_parameters(), operators.identity
    )
    for g, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(g, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("space", [1, 2])
@pytest.mark.parametrize("share_positions", [False, True])
def test_instance_norm_below_an_op_in_place(space: int, share_positions: bool) -> None:
    """Its sigma is a view to torch, on which an op in place is another node."""
    model = [nn.InstanceNorm1d, nn.InstanceNorm2d][space - 1](3, affine=True)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    x = torch.randn(BATCH, 3, *[4] * space)

    def gradients(activation: Callable[[Tensor], Tensor]) -> Any:
        return virtual_grad(
            (activation(model(x)) - 1).square().mean(),
            model.named_parameters(),
            operators.RMS(scale=SCALE, share_positions=share_positions),
            batch_size=BATCH,
        )

    torch.testing.assert_close(gradients(torch.relu_), gradients(torch.relu), rtol=1e-12, atol=0)
