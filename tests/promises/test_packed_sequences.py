"""Packed sequences: inside a model, and as its input."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from twin import LR, SCALE, shared_linear_step

from virtualgrad import SVGD

BATCH, WIDTH, CLASSES = 5, 4, 3


class Packing(nn.Module):
    """Packs inside: the fused kernel sees a packed sequence, the layers a padded one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.kernel = nn.GRU(WIDTH, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embed(x)
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.kernel(packed)[0], batch_first=True)
        filled = torch.arange(x.shape[1]) < lengths[:, None]
        return (self.head(hidden) * filled[..., None]).sum(1) / lengths[:, None]


def test_sequences_packed_inside_the_model() -> None:
    """Packing drops the padding; sample by sample is the oracle, where there is none to drop."""
    torch.manual_seed(0)
    model = Packing().double()
    lengths = torch.tensor([7, 3, 5, 1, 6])
    x, y = torch.randn(BATCH, 7, WIDTH).double(), torch.randint(0, CLASSES, (BATCH,))

    def statistics(x: Tensor, lengths: Tensor, y: Tensor) -> dict[str, Tensor]:
        m = copy.deepcopy(model)
        optimizer = SVGD(m, LR)
        F.cross_entropy(m(x, lengths), y).backward()
        optimizer.step()
        return {key: state["r"] for key, state in optimizer.operator.state.items()}

    together = statistics(x, lengths, y)
    assert set(together) == {"embed:linear(weight)", "head:linear(weight)"}
    for key, r in together.items():
        expected = torch.zeros_like(r)
        for i, length in enumerate(lengths.tolist()):
            one = slice(i, i + 1)
            expected[:length] += statistics(x[one, :length], lengths[one], y[one])[key] / BATCH
        assert expected.min() > 0
        torch.testing.assert_close(r, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "rows",
    [
        [7, 3, 5, 1, 6],
        [1, 1, 1, 1, 1],
    ],
    ids=["lengths differ", "one each"],
)
def test_a_packed_sequence_as_input(rows: list[int]) -> None:
    """M is the number of sequences, not of rows."""

    class OnRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES)

        def forward(self, packed: PackedSequence) -> Tensor:
            return self.layer(packed.data)

    torch.manual_seed(0)
    model = OnRows().double()
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    x = torch.randn(BATCH, max(rows), WIDTH).double()
    packed = pack_padded_sequence(x, torch.tensor(rows), batch_first=True, enforce_sorted=False)
    model(packed).square().mean().backward()
    sigma = model.layer(packed.data).detach().requires_grad_()
    (g,) = torch.autograd.grad(sigma.square().mean(), sigma)
    r, for_weight, for_bias = shared_linear_step(
        torch.zeros(CLASSES).double(), g, packed.data, BATCH
    )
    torch.testing.assert_close(model.layer.weight.grad, for_weight, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(model.layer.bias.grad, for_bias, rtol=1e-10, atol=1e-13)
    optimizer.step()
    (state,) = optimizer.operator.state.values()
    torch.testing.assert_close(state["r"], r, rtol=1e-10, atol=0)
