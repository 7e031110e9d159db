"""A model with sites of every kind, and its steps, for which nobody waits on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad import SVGD, VirtualGradientDescent, operators

Make = Callable[..., VirtualGradientDescent]

READINGS: dict[str, Make] = {
    "Algorithm 1": lambda model, **more: SVGD(model, 0.1, **more),
    "released": lambda model, **more: SVGD.released(model, 0.1, 0.01, **more),
    "shared": lambda model, **more: SVGD.released(model, 0.1, 0.01, share_positions=True, **more),
    "momentum": lambda model, **more: SVGD(model, 0.1, momentum=0.9, weight_decay=0.1, **more),
    "groups": lambda model, **more: SVGD(
        model,
        0.1,
        params=[
            {
                "params": [p for n, p in model.named_parameters() if "0" in n],
                "lr": 0.05,
                "rho": 0.5,
            },
            {"params": [p for n, p in model.named_parameters() if "0" not in n]},
        ],
        **more,
    ),
    "the identity": lambda model, **more: VirtualGradientDescent(model, 0.1, **more),
    "sign": lambda model, **more: VirtualGradientDescent(model, 0.1, operators.Sign(), **more),
}


class Added(nn.Module):
    """Position embeddings: their r is of values for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(6, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        Added(),
        nn.Conv2d(6, 4, 3),
        nn.Flatten(),
        nn.Linear(36, 7),
        nn.Tanh(),
        nn.Linear(7, 2),
    ).to(device)


def batch(number: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, 5, 5, generator=generator).to(device)


def pass_through(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()


def kept(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Parameters, and the state of the optimizer; not what a forward pass has written."""
    found = [parameter.detach().clone() for parameter in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found
