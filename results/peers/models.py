"""How a model is wired: one probe per feature, asked with the name of a library."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from libraries import (
    CLASSES,
    NO,
    PARTIAL,
    SAMPLERS,
    SINGD,
    WIDTH,
    Verdict,
    data,
    difference,
    per_sample,
    plain_step,
    train,
    verdict,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, CLASSES)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.on:
            return self.last(self.block(x))
        return self.last(recompute(self.block, x, use_reentrant=self.use_reentrant))


def _checkpoint(library: str, use_reentrant: bool) -> Verdict:
    if library != "singd":
        model, plain = Checkpointed(use_reentrant), Checkpointed(use_reentrant)
        plain.load_state_dict(model.state_dict())
        plain.on = False
        return verdict(per_sample(SAMPLERS[library], model, expect=plain), "as without it")

    def off() -> nn.Module:
        model = Checkpointed(use_reentrant)
        model.on = False
        return model

    found = train(SINGD.optimizer, model=lambda: Checkpointed(use_reentrant))
    return verdict(difference(found, train(SINGD.optimizer, model=off)), "as without it")


def checkpoint(library: str) -> Verdict:
    return _checkpoint(library, use_reentrant=False)


def checkpoint_reentrant(library: str) -> Verdict:
    return _checkpoint(library, use_reentrant=True)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.layer(x))))


def _two_factor_pairs(model: nn.Module) -> Verdict:
    """SINGD, whatever it computes there, must at least train all parameters."""
    optimizer = SINGD.optimizer(model.double())
    start = copy.deepcopy(model)
    x, y = data()
    plain_step(model, optimizer, x, y)
    pairs = zip(model.named_parameters(), start.parameters(), strict=True)
    still = [name for (name, a), b in pairs if torch.equal(a, b)]
    if still:
        return NO, f"{still[0]} is not trained"
    return PARTIAL, "trains; the uses share one pair of factors"


def reused(library: str) -> Verdict:
    if library == "singd":
        return _two_factor_pairs(Reused())
    return verdict(per_sample(SAMPLERS[library], Reused()), "sums over the uses")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


def tied(library: str) -> Verdict:
    if library != "singd":
        return verdict(per_sample(SAMPLERS[library], Tied()), "sums over the layers")
    model = Tied().double()
    optimizer = SINGD.optimizer(model, momentum=0.0, lr_cov=0.0)  # factors stay 1: SGD's step
    x, y = data()
    before = model.first.weight.detach().clone()
    F.cross_entropy(model(x), y).backward()
    wanted = optimizer.param_groups[0]["lr"] * model.first.weight.grad.norm()
    optimizer.step()
    times = float((model.first.weight - before).norm() / wanted)
    if abs(times - 1) < 1e-6:
        return PARTIAL, "trains; each of the two layers keeps its own factors"
    return NO, f"the shared weight is moved {times:.1f} times as far as its gradient says"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.first(x))
        y = self.second(x)
        if self.relu.inplace:
            y += x
        else:
            y = y + x
        return self.last(y)


def in_place(library: str) -> Verdict:
    if library == "singd":

        def out_of_place() -> nn.Module:
            model = InPlace()
            model.relu.inplace = False
            return model

        ends = [train(SINGD.optimizer, model=model) for model in (InPlace, out_of_place)]
        return verdict(difference(*ends), "as out of place")
    return verdict(per_sample(SAMPLERS[library], InPlace()), "right")
