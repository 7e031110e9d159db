"""Other libraries on the same work: what one would run otherwise to see such statistics.

| name       | library  | what it computes in the backward pass                            |
|------------|----------|------------------------------------------------------------------|
| `backpack` | BackPACK | the sum over samples of squared gradients of every parameter     |
| `opacus`   | Opacus   | the gradient of every sample, for every parameter                |
| `singd`    | SINGD    | diagonal Kronecker factors of every layer, and steps along them  |

The first two make an SGD step with it; SINGD renews its factors in every step (T=1), as SVGD does
its r. They are imported when they are asked for, and no dependency of this project: where one is
missing, its row says so. All of them refuse or ignore batch norm, so the networks are the paper's
MLP and VGG without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.bench.methods import LR, METHODS, Method
from virtualgrad.lab.bench.networks import NETWORKS, Network

DISTRIBUTIONS = {"backpack": "backpack-for-pytorch", "opacus": "opacus", "singd": "singd"}


class NotInstalledError(VirtualGradError, ImportError):
    """A library to compare with is not installed."""


def _library(name: str) -> ModuleType:
    """Import a module of one of the libraries."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f" ({error.name} is missing)" if error.name != package else ""
        raise NotInstalledError(
            f"not installed{missing}; pip install {DISTRIBUTIONS[package]}"
        ) from error


def _extended(model: nn.Module) -> nn.Module:
    extended: nn.Module = _library("backpack").extend(model)
    return extended


def _squared_backward(loss: Tensor) -> None:
    squares = _library("backpack.extensions").SumGradSquared()
    with _library("backpack").backpack(squares):
        loss.backward()


def _per_sample(model: nn.Module) -> nn.Module:
    wrapped: nn.Module = _library("opacus").GradSampleModule(model)
    return wrapped


def _sgd(model: nn.Module, capturable: bool) -> Optimizer:
    return SGD(model.parameters(), LR)


class _PerSampleSGD(SGD):
    """Forgets the gradients of single samples together with those of the batch."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad_sample = None


def _per_sample_sgd(model: nn.Module, capturable: bool) -> Optimizer:
    return _PerSampleSGD(model.parameters(), LR)


def _singd(model: nn.Module, capturable: bool) -> Optimizer:
    make: Callable[..., Any] = _library("singd.optim.optimizer").SINGD
    optimizer: Optimizer = make(model, lr=LR, structures=("diagonal", "diagonal"), T=1)
    return optimizer


PEERS = {
    method.name: method
    for method in (
        Method(
            "backpack",
            "BackPACK",
            _sgd,
            foreign=True,
            prepare=_extended,
            backward=_squared_backward,
        ),
        Method("opacus", "Opacus", _per_sample_sgd, foreign=True, prepare=_per_sample),
        Method("singd", "SINGD", _singd, foreign=True),
    )
}

COMPARED = (METHODS["sgd"], METHODS["svgd"], METHODS["svgd-released"], *PEERS.values())


def without_norm(network: Network) -> Network:
    """The same network with nothing in place of each batch norm."""

    def build() -> nn.Module:
        return _strip(network.build())

    return replace(
        network, name=f"{network.name}-no-norm", title=f"{network.title}, no norm", build=build
    )


def _strip(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        is_norm = isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d)
        setattr(module, name, nn.Identity() if is_norm else _strip(child))
    return module


PEER_NETWORKS = {
    network.name: network
    for network in (without_norm(NETWORKS["mlp"]), without_norm(NETWORKS["vgg"]))
}
