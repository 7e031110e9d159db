"""Train a copy of a model on a few batches, and say how low the loss came."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from virtualgrad.errors import NonFiniteError
from virtualgrad.optim import SVGD
from virtualgrad.settings.batches import LossFunction, copied, loss_of, random_numbers_kept


def loss_before(model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any]) -> float:
    """Mean loss over the batches, in the mode that the model is in; its buffers may change."""
    with random_numbers_kept(model, batches[0]), torch.enable_grad():
        return fmean(loss_of(model, loss_fn, batch).item() for batch in batches)


def try_current(
    model: nn.Module, optimizer: Optimizer, loss_fn: LossFunction, batches: Sequence[Any]
) -> float:
    """Mean loss over the batches after a copy has made a step on each with its own optimizer."""
    twin, same = copied((model, optimizer))
    return _try(twin, lambda: same, loss_fn, batches)


def try_svgd(
    model: nn.Module, settings: dict[str, float], loss_fn: LossFunction, batches: Sequence[Any]
) -> float:
    """The same with SVGD; infinite if a loss or a gradient was not finite on the way."""
    twin = copied(model)
    return _try(twin, lambda: SVGD.released(twin, **settings), loss_fn, batches)


def _try(
    twin: nn.Module,
    make: Callable[[], Optimizer],
    loss_fn: LossFunction,
    batches: Sequence[Any],
) -> float:
    optimizer = make()
    attached = optimizer if isinstance(optimizer, SVGD) else nullcontext()
    try:
        with attached, random_numbers_kept(twin, batches[0]), torch.enable_grad():
            for batch in batches:
                optimizer.zero_grad()
                loss_of(twin, loss_fn, batch).backward()
                optimizer.step()
            if isinstance(optimizer, SVGD):
                optimizer.settle()
        return loss_before(twin, loss_fn, batches)
    except NonFiniteError:
        return math.inf
