"""Lookups by any index: axes that its tensors make count samples and positions, as in t[ids]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD, operators, virtual_grad

LENGTH, ROWS, WIDTH = 3, 7, 5
SCALE, RHO, EPS = 0.3, 0.9, 1e-6
Look = Callable[[Tensor, Tensor], Tensor]

INDICES: dict[str, tuple[tuple[int, ...], Look, tuple[int, ...]]] = {
    # the table, the lookup, and r's shape for tokens (m, LENGTH)
    "a slice behind": ((ROWS, WIDTH), lambda t, i: t[i, :], (LENGTH, WIDTH)),
    "a part of it": ((ROWS, WIDTH), lambda t, i: t[i, 1:], (LENGTH, WIDTH - 1)),
    "an ellipsis": ((ROWS, WIDTH), lambda t, i: t[i, ...], (LENGTH, WIDTH)),
    "an axis of one": ((ROWS, WIDTH), lambda t, i: t[i, None], (LENGTH, 1, WIDTH)),
    "a number before": ((2, ROWS, WIDTH), lambda t, i: t[1, i], (LENGTH, WIDTH)),
    "a number behind": ((ROWS, 2, WIDTH), lambda t, i: t[i, 1], (LENGTH, WIDTH)),
    "a tensor of one number": ((2, ROWS), lambda t, i: t[torch.tensor(1), i], (LENGTH,)),
    "pairs": ((ROWS, ROWS), lambda t, i: t[i, i.flip(1)], (LENGTH,)),
    "pairs in front": ((ROWS, ROWS, 2), lambda t, i: t[i, i.flip(1)], (LENGTH, 2)),
    "pairs apart": ((ROWS, 2, ROWS), lambda t, i: t[i, :, i.flip(1)], (LENGTH, 2)),
    "pairs that broadcast": ((ROWS, ROWS), lambda t, i: t[i, i[:, :1]], (LENGTH,)),
}


class Table(nn.Module):
    """A table in which samples look something up."""

    def __init__(self, index: str) -> None:
        super().__init__()
        shape, self.look, _ = INDICES[index]
        self.table = nn.Parameter(torch.randn(shape))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.look(self.table, tokens)


def tokens(size: int) -> Tensor:
    return torch.randint(ROWS, (size, LENGTH))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("index", INDICES)
def test_r_is_a_mean_over_samples(index: str) -> None:
    """Against the definition in plain code, for batches of any size."""
    model = Table(index)
    other = nn.Parameter(model.table.detach().clone())
    rms, r = operators.RMS(scale=SCALE), torch.zeros(INDICES[index][2])
    optimizer = SVGD(model, 0.1, scale=SCALE)
    for size in (6, 4, 6):
        batch = tokens(size)
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        sigma = INDICES[index][1](other, batch)
        g = (2 * (sigma - 1) / sigma.numel()).detach()
        r = RHO * r + (1 - RHO) * (size * g).square().mean(0)
        (expected,) = torch.autograd.grad(sigma, other, SCALE * g / torch.sqrt(r + EPS))
        loss = (INDICES[index][1](other, batch) - 1).square().mean()
        (found,) = virtual_grad(loss, [("table", other)], rms, batch_size=size)
        torch.testing.assert_close(model.table.grad, expected, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
        optimizer.step()
        with torch.no_grad():
            other -= 0.1 * expected


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8])
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_rows_that_a_mask_picks_share_their_r(mask: torch.dtype) -> None:
    """However many they are."""
    table = nn.Parameter(torch.randn(ROWS, WIDTH))

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            return x.mean() * self.table[(x[0] > 0).to(mask)]

    model = Masked()
    optimizer = SVGD(model, 0.1, scale=SCALE, share_positions=True)
    for picked in (2, 5, 4):
        optimizer.zero_grad()
        x = torch.cat([torch.ones(3, picked), -torch.ones(3, ROWS - picked)], 1)
        model(x).square().mean().backward()
        optimizer.step()
    (r,) = (v for k, v in optimizer.state_dict()["state"][0].items() if k.startswith("r@"))
    assert r.shape == (WIDTH,)
