"""Activation checkpointing, both variants: r counts each sigma once, and the step is the same.

The recomputation runs inside backward. The oracle is the same model without checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from zoo import ARCHITECTURES

from virtualgrad import SVGD, Site, weights_only

BATCH, LR = 6, 0.05

Run = Callable[..., Tensor]


def plainly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def reentrant(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrant(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False)


class Blocks(nn.Module):
    """Blocks under checkpoints between two layers that are under none."""

    def __init__(self, run: Run, dropout: float = 0.0) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(3)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.run(block, x)
        return self.head(x)


class Whole(nn.Module):
    """The whole model under one checkpoint: a reentrant one records nothing of it in forward."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.network, x)


class Reused(nn.Module):
    """One layer under three checkpoints: three sigma, three r; no graph outside holds the pass."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.run(self.layer, x))
        return x[:, :3]


class ReusedBelowHead(Reused):
    """The same below a layer that is under none: its graph holds the pass."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Folded(nn.Module):
    """A block that sees samples and positions in one axis: its input has not the batch's size."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Linear(4, 5)
        self.block = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.view(BATCH, 2, 2).repeat(1, 1, 2))
        return self.run(self.block, hidden.flatten(0, 1)).view(BATCH, 2, 3).sum(1)


MODELS: dict[str, Callable[[Run], nn.Module]] = {
    "blocks": Blocks,
    "blocks with dropout": lambda run: Blocks(run, dropout=0.5),
    "whole": Whole,
    "reused": Reused,
    "reused below a head": ReusedBelowHead,
    "folded": Folded,
}


def trained(make: Callable[[Run], nn.Module], run: Run) -> tuple[nn.Module, SVGD]:
    torch.manual_seed(0)
    model = make(run).double()
    optimizer = SVGD(model, LR)
    torch.manual_seed(1)
    for _ in range(4):
        x, y = torch.randn(BATCH, 4).double(), torch.randint(0, 3, (BATCH,))
        optimizer.zero_grad()
        # A reentrant checkpoint has a gradient only if its input has one.
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("run", [not_reentrant, reentrant])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_training_is_the_same(name: str, run: Run) -> None:
    model, optimizer = trained(MODELS[name], run)
    reference, plain = trained(MODELS[name], plainly)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
    found, expected = optimizer.operator.state, plain.operator.state
    assert found.keys() == expected.keys()
    if run is reentrant:  # recomputed, and so numbered, from the last use on
        uses = sorted(key for key in found if key.startswith("layer:"))
        found = found | dict(zip(uses, [found[key] for key in reversed(uses)], strict=True))
    for key, state in expected.items():
        assert torch.equal(found[key]["r"], state["r"]), key


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_sequential(use_reentrant: bool) -> None:
    def run(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return checkpoint_sequential(function, 3, x, use_reentrant=use_reentrant)

    model, optimizer = trained(Whole, run)
    reference, plain = trained(Whole, plainly)
    assert optimizer.operator.state.keys() == plain.operator.state.keys()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


CHOICES: dict[str, Callable[[Site], bool]] = {
    "weights only": weights_only,
    "weights of any op": lambda site: site.roles == ("weight",),
    "norms": lambda site: site.op == "layer_norm",
    "nothing": lambda site: False,
}


@pytest.mark.parametrize("name", ["blocks", "whole", "reused below a head"])
@pytest.mark.parametrize("choice", CHOICES)
def test_checkpoints_that_come_and_go_in_training(choice: str, name: str) -> None:
    """What is recomputed runs as it ran, though it is a use of which nobody has asked before."""
    trained = []
    for runs in ((plainly,) * 5, (plainly, plainly, not_reentrant, not_reentrant, plainly)):
        torch.manual_seed(0)
        model: nn.Module = MODELS[name](plainly).double()
        optimizer = SVGD(model, LR, where=CHOICES[choice])
        for model.run in runs:  # type: ignore[assignment]
            x, y = torch.randn(BATCH, 4).double(), torch.randint(0, 3, (BATCH,))
            optimizer.zero_grad()
            F.cross_entropy(model(x.requires_grad_()), y).backward()
            optimizer.step()
        trained.append(model)
    for p, q in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        assert torch.equal(p, q)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "ViT"])
def test_gradient_checkpointing_of_transformers(name: str, use_reentrant: bool) -> None:
    architecture = ARCHITECTURES[name]
    models = [architecture.model(), architecture.model()]
    models[0].gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert models[0].is_gradient_checkpointing
    recomputed = []
    inside = (".h.1", ".layer.1", ".layers.1")
    block = next(m for n, m in models[0].named_modules() if n.endswith(inside))
    block.register_forward_pre_hook(lambda *_: recomputed.append(in_backward()))
    optimizers = [SVGD(model, LR) for model in models]
    for step in range(2):
        batch = architecture.batch(seed=step)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            architecture.loss(model, *batch).backward()
            optimizer.step()
    assert recomputed == [False, True] * 2  # it is checkpointed, and runs twice in each step
    first, second = (optimizer.operator.state for optimizer in optimizers)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key]["r"], second[key]["r"]) for key in first)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
