"""A model with two losses, and how they may be taken back; also in processes, which import this."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import LR, SCALE

from virtualgrad import SVGD

BATCH, STEPS = 6, 4


class Heads(nn.Module):
    """A body under two heads, whose losses meet in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)
        self.double()

    def losses(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Of what the body has made."""
        hidden = torch.tanh(sigma)
        return self.a(hidden).cos().mean(), F.softplus(self.b(hidden)).mean()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.losses(self.body(x))


def batches(count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 4, generator=generator).double() for _ in range(count)]


def summed(first: Tensor, second: Tensor) -> None:
    (first + second).backward()


def at_once(first: Tensor, second: Tensor) -> None:
    torch.autograd.backward([first, second])


def retained(first: Tensor, second: Tensor) -> None:
    (first + second).backward(retain_graph=True)


def one_after_the_other(first: Tensor, second: Tensor) -> None:
    first.backward(retain_graph=True)
    second.backward()


def r_of(optimizer: SVGD) -> dict[str, Tensor]:
    return {key: state["r"] for key, state in optimizer.operator.state.items()}


def one_after_the_other_on_ranks(rank: int, ranks: int, options: Any) -> dict[str, Tensor]:
    """Some steps of each rank with its part of the batch; the last r, and the parameters.

    DDP reduces in the first of two passes through a graph, so it must not be told of the others:
    here the gradients are averaged by hand, as without it.
    """
    model = Heads()
    optimizer = SVGD(model, LR, scale=SCALE, **options)
    for x in batches(2):
        optimizer.zero_grad()
        one_after_the_other(*model(x.chunk(ranks)[rank]))
        for parameter in model.parameters():
            if ranks > 1:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= ranks
        optimizer.step()
    return {**r_of(optimizer), **model.state_dict()}
