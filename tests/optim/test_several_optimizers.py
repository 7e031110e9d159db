"""Several optimizers on one model train it as one does, however they share its parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD

BATCH, LENGTH, WIDTH = 3, 5, 4

pytestmark = pytest.mark.usefixtures("double_precision")


class Attention(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        self.norm, self.batch_first = nn.LayerNorm(WIDTH), batch_first

    def forward(self, x: Tensor) -> Tensor:
        inside = x if self.batch_first else x.transpose(0, 1)
        inside = self.attention(inside, inside, inside)[0]
        return self.norm(x + (inside if self.batch_first else inside.transpose(0, 1)))


class Checkpointed(nn.Module):
    """A method whose first op is another optimizer's than its second."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.method, x, use_reentrant=self.reentrant)
        return x

    def method(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x * self.gain) @ self.matrix) + self.gain


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(True),
    "attention, time first": lambda: Attention(False),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True),
    "reentrant": lambda: Checkpointed(True),
    "non-reentrant": lambda: Checkpointed(False),
}
SHARES: dict[str, Callable[[list[nn.Parameter]], list[list[nn.Parameter]]]] = {
    "each": lambda all_: [[one] for one in all_],
    "backwards": lambda all_: [[one] for one in reversed(all_)],
    "by turns": lambda all_: [all_[::3], all_[1::3], all_[2::3]],
}


def trained(
    model: str, share: Callable[[list[nn.Parameter]], list[list[nn.Parameter]]]
) -> nn.Module:
    torch.manual_seed(0)
    module = MODELS[model]()
    optimizers = [SVGD(module, 0.05, scale=0.3, params=p) for p in share(list(module.parameters()))]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (module(torch.randn(BATCH, LENGTH, WIDTH)) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return module


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("model", MODELS)
def test_several_train_as_one_does(model: str, share: str) -> None:
    found, expected = trained(model, SHARES[share]), trained(model, lambda all_: [all_])
    for (name, one), its in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, its, rtol=1e-7, atol=1e-10, msg=name)
