"""Sequences of any length, batch first or time first, padded.

The oracle for T is the definition in plain code, on a layer whose g is taken by autograd.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import LR, SCALE, Twin, assert_trained_alike, shared_linear_step

from virtualgrad import SVGD
from virtualgrad.errors import ShapeChangedError

BATCH, WIDTH, CLASSES = 5, 4, 3


class Tagger(nn.Module):
    """Two layers and a norm on every position, then the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, time: int = 1) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x)))).mean(time)


class Cells(nn.Module):
    """A recurrent network made of a cell, whose uses are sites; batch first or time first."""

    def __init__(self, cell: type[nn.RNNCellBase], time: int) -> None:
        super().__init__()
        self.cell = cell(WIDTH, 6)
        self.head = nn.Linear(6, CLASSES)
        self.time = time

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(self.time):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def batch(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, length, WIDTH).double(), torch.randint(0, CLASSES, (BATCH,))


def test_lengths_that_change_need_shared_positions() -> None:
    model = Tagger().double()
    optimizer = SVGD(model, LR)
    for length in (7, 4):
        x, y = batch(length)
        loss = F.cross_entropy(model(x), y)
        if length == 7:
            loss.backward()
            optimizer.step()
        else:
            with pytest.raises(ShapeChangedError, match="share_positions=True"):
                loss.backward()


def test_lengths_that_change() -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    start, twin = copy.deepcopy(model), Twin(model, share_positions=True)
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    for length in (7, 4, 1, 9, BATCH, 2 * BATCH):  # also lengths that look like batches
        x, y = batch(length)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x), y), BATCH)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)
    shapes = {tuple(state["r"].shape) for state in optimizer.operator.state.values()}
    assert shapes == {(6,), (CLASSES,)}


def test_padded_positions_are_positions() -> None:
    """A padded position has g = 0 and counts in the mean, as the definition says."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, CLASSES).double()
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    weight, bias, r = (
        model.weight.detach().clone(),
        model.bias.detach().clone(),
        torch.zeros(CLASSES),
    )
    for lengths in ([7, 3, 5, 1, 7], [2, 4, 4, 1, 3]):
        x = torch.randn(BATCH, max(lengths), WIDTH).double()
        y = torch.randint(0, CLASSES, x.shape[:2])
        for sample, length in enumerate(lengths):
            y[sample, length:] = -100
        optimizer.zero_grad()
        F.cross_entropy(model(x).mT, y, ignore_index=-100).backward()
        optimizer.step()
        sigma = F.linear(x, weight, bias).requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(sigma.mT, y, ignore_index=-100), sigma)
        assert (g[y == -100] == 0).all()
        r, for_weight, for_bias = shared_linear_step(r, g.flatten(0, 1), x.flatten(0, 1), BATCH)
        weight, bias = weight - LR * for_weight, bias - LR * for_bias
    torch.testing.assert_close(model.weight, weight, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(model.bias, bias, rtol=1e-10, atol=1e-13)
    (state,) = optimizer.operator.state.values()
    torch.testing.assert_close(state["r"], r, rtol=1e-10, atol=0)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_time_first_cells_train_as_batch_first_ones(cell: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    model = Cells(cell, time=0).double()
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    reference.time = 1
    time_first = SVGD(model, LR, scale=SCALE, batch_dim=1)
    batch_first = SVGD(reference, LR, scale=SCALE)
    for _ in range(4):
        x, y = batch(7)
        for m, optimizer, inputs in (
            (model, time_first, x.transpose(0, 1)),
            (reference, batch_first, x),
        ):
            optimizer.zero_grad()
            F.cross_entropy(m(inputs), y).backward()
            optimizer.step()
    assert_trained_alike(model, reference, start)


@pytest.mark.parametrize("share_positions", [False, True])
def test_time_first_layers_train_as_batch_first_ones(share_positions: bool) -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    start, reference = copy.deepcopy(model), copy.deepcopy(model)
    options = {"scale": SCALE, "share_positions": share_positions}
    time_first = SVGD(model, LR, batch_dim=1, **options)
    batch_first = SVGD(reference, LR, **options)
    for _ in range(4):
        x, y = batch(7)
        for m, optimizer, time in ((model, time_first, 0), (reference, batch_first, 1)):
            optimizer.zero_grad()
            F.cross_entropy(m(x if time else x.transpose(0, 1), time), y).backward()
            optimizer.step()
    assert_trained_alike(model, reference, start)


@pytest.mark.parametrize("kernel", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [True, False])
def test_fused_kernels_keep_the_plain_gradient(kernel: type[nn.RNNBase], batch_first: bool) -> None:
    """One nonlinear op for the optimizer; the layers around it have their T."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = kernel(WIDTH, 6, batch_first=batch_first)
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.kernel(x)[0]).mean(1 if batch_first else 0)

    torch.manual_seed(0)
    model = Recurrent().double()
    plain = copy.deepcopy(model)
    optimizer = SVGD(model, LR, batch_dim=0 if batch_first else 1)
    x, y = batch(7)
    x = x if batch_first else x.transpose(0, 1)
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    for p, q in zip(model.kernel.parameters(), plain.kernel.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert not torch.allclose(model.head.weight.grad, plain.head.weight.grad)
    optimizer.step()
    assert [tuple(s["r"].shape) for s in optimizer.operator.state.values()] == [(7, CLASSES)]
