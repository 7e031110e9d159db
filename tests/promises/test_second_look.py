"""Found by a second look at the promises, and mended: small batches, slices, expansion."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import ARCHITECTURES

from virtualgrad import SVGD, operators, virtual_grad

BATCH, LENGTH, WIDTH, LR = 6, 5, 4, 0.05


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3)])
@pytest.mark.parametrize("name", ["GPT-2", "BERT", "BART", "CLIP", "Llama"])
def test_a_batch_of_one_sample(name: str, sizes: tuple[int, int]) -> None:
    """The last batch of an epoch; a table of positions is (1, T, C) in any batch."""
    architecture = ARCHITECTURES[name]
    model = architecture.model()
    optimizer = SVGD(model, LR)
    inputs, labels = architecture.batch()
    for size in sizes:
        optimizer.zero_grad()
        some = {key: value[:size] for key, value in inputs.items()}
        architecture.loss(model, some, labels[:size]).backward()
        optimizer.step()


class Expanded(nn.Module):
    """Learned queries, one set per sample, times a gain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Parameter(torch.randn(LENGTH, WIDTH).double())
        self.gain = nn.Parameter(torch.randn(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.queries.expand(len(x), -1, -1) * self.gain)


def test_an_expanded_parameter_has_samples() -> None:
    model = Expanded()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    sigma = (model.queries.expand(BATCH, -1, -1) * model.gain).detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(x + sigma).square().mean(), sigma)
    with SVGD(model, LR) as optimizer:
        model(x).square().mean().backward()
        optimizer.step()
    (state,) = optimizer.operator.state.values()
    torch.testing.assert_close(state["r"], 0.1 * (BATCH * g).square().mean(0), rtol=1e-10, atol=0)


def test_the_recorded_graph_reads_a_leading_axis_of_one_alike() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.randn(1, LENGTH, WIDTH).double())
            self.gain = nn.Parameter(torch.randn(WIDTH).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + self.table * self.gain)

    model, plain = Positions(), Positions()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    expected = virtual_grad(
        plain(x).square().mean(), plain.named_parameters(), operators.RMS(), batch_size=BATCH
    )
    with SVGD(model, LR):
        model(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=0)


class Block(nn.Module):
    """A block under a reentrant checkpoint, or under none; with layers around it, or alone."""

    def __init__(self, is_checkpointed: bool, is_alone: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.first = nn.Identity() if is_alone else nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Identity() if is_alone else nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.is_checkpointed:
            return self.head(checkpoint(self.block, x, use_reentrant=True))
        return self.head(self.block(x))


@pytest.mark.parametrize("is_alone", [False, True])
def test_calls_of_several_sizes_under_reentrant_checkpoints(is_alone: bool) -> None:
    models = []
    for is_checkpointed in (True, False):
        torch.manual_seed(0)
        model = Block(is_checkpointed, is_alone).double()
        optimizer = SVGD(model, LR)
        for _ in range(2):
            x, y = torch.randn(4, 4).double(), torch.randn(6, 4).double()
            optimizer.zero_grad()
            losses = [model(part.requires_grad_()).square().mean() for part in (x, y)]
            losses[0].backward()
            losses[1].backward()
            optimizer.step()
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)


def test_a_micro_batch_with_a_gradient_of_zero_counts_wherever_it_comes() -> None:
    """All of its labels are masked, for example: it is not a batch that was given up."""
    found = []
    for weights in ((0.0, 1.0), (1.0, 0.0)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        x = torch.randn(BATCH, 4).double()
        with SVGD(model, LR) as optimizer:
            for weight in weights:
                (weight * model(x).square().mean()).backward()
            optimizer.step()
        (state,) = optimizer.operator.state.values()
        found.append(state["r"])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=0)


SLICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "negative": lambda w, i: w[i - 4],
    "negative slice": lambda w, i: w[i - 4 :][0],
    "slice, then select": lambda w, i: w.narrow(0, i, 1)[0],
    "steps": lambda w, i: w[i::2][0],
    "chunk of the last axis": lambda w, i: w.chunk(4, -1)[i].squeeze(-1),
    "transposed": lambda w, i: w.transpose(1, 2)[i],
    "flat": lambda w, i: w.view(16, 4)[4 * i : 4 * i + 4],
    "swapped": lambda w, i: w.permute(1, 0, -1)[:, i],
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_by_the_recorded_graph(name: str) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weights = nn.Parameter(torch.randn(4, 4, 4).double())

        def forward(self, x: Tensor, number: int) -> Tensor:
            return torch.tanh(F.linear(x, SLICES[name](self.weights, number)))

    model, plain = Sliced(), Sliced()
    optimizer, rms = SVGD(model, LR), operators.RMS()
    for number in (0, 2, 1, 2, 3):
        x = torch.randn(BATCH, 4).double()
        plain.load_state_dict(model.state_dict())
        loss = plain(x, number).square().mean()
        (expected,) = virtual_grad(loss, plain.named_parameters(), rms, batch_size=BATCH)
        optimizer.zero_grad()
        model(x, number).square().mean().backward()
        torch.testing.assert_close(model.weights.grad, expected, rtol=1e-10, atol=0)
        optimizer.step()


def test_model_zero_grad_to_zeros_is_told_to_the_optimizer_on_any_device() -> None:
    """Nobody looks at values: here they are on the CPU, but a step with zeros alone is a step."""
    model = nn.Linear(4, 3).double()
    with SVGD(model, LR) as optimizer:
        model(torch.randn(BATCH, 4).double()).square().mean().backward()
        model.zero_grad(set_to_none=False)
        optimizer.step()
        assert not optimizer.operator.state
