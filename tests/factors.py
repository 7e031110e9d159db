"""What T makes of a gradient, in steps of an optimizer whose T is a factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad import VirtualGradientDescent

STEPS = 6


def twice(g: Tensor, site: Any) -> Tensor:
    """A T that shows as a factor of the gradient."""
    return 2 * g


def factors(
    model: nn.Module,
    parameter: Callable[[], Tensor],
    before: Callable[[int], None] = lambda step: None,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> list[float]:
    """What T makes of a parameter's gradient in each step: 2 where it acts once."""
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    found = []
    for step in range(STEPS):
        before(step)
        x = torch.randn(4, 3)
        optimizer.zero_grad()
        run(model, x).square().sum().backward()
        grad = parameter().grad
        assert grad is not None
        loss = run_plainly(model, run, x, optimizer)
        (plain,) = torch.autograd.grad(loss, parameter())
        found.append(float((grad / plain).mean()))
    optimizer.detach()
    return found


def run_plainly(
    model: nn.Module,
    run: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
    optimizer: VirtualGradientDescent,
) -> Tensor:
    """The loss of the model as it is without its optimizer."""
    assert optimizer._attachment is not None
    optimizer._attachment.active = False
    try:
        return run(model, x).square().sum()
    finally:
        optimizer._attachment.active = True
