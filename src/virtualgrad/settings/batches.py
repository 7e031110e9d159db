"""Batches, losses and copies: what is needed to try something and leave no trace of it."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from virtualgrad.errors import LossError, ModelError, NonFiniteError, VirtualGradError
from virtualgrad.optim import checks
from virtualgrad.virtual import unwrap
from virtualgrad.virtual.inputs import batch_size
from virtualgrad.virtual.ops import tensors_in

LossFunction = Callable[..., Tensor]
"""``loss_fn(model(x), y)`` for a batch (x, y); ``loss_fn(model, batch)`` for any other batch."""

Copied = TypeVar("Copied")


class SettingsError(VirtualGradError, ValueError):
    """There is nothing to find settings from: no batches, or an optimizer that is not known."""


def loss_of(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Tensor:
    """The loss J of one batch, a finite scalar.

    Raises:
        LossError: It is no scalar that depends on the parameters.
        NonFiniteError: It is NaN or infinite.
    """
    loss: Any = loss_fn(model(batch[0]), batch[1]) if is_pair(batch) else loss_fn(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "without a graph"
        raise LossError.of(
            given=f"a loss_fn that returns a {type(loss).__name__} {shape}",
            allowed="a tensor with one element that depends on the parameters",
            todo="reduce the loss, as by .mean(), and compute it outside torch.no_grad()",
        )
    if not torch.isfinite(loss.detach()).all():
        raise NonFiniteError.of(
            given=f"a loss of {loss.item()}",
            allowed="batches with a finite loss",
            todo="look at that batch, or begin from weights at which the loss is finite",
        )
    return loss


def is_pair(batch: Any) -> bool:
    """Whether a batch is (input, target), as most loaders deliver it."""
    return isinstance(batch, list | tuple) and len(batch) == 2


def samples_in(batch: Any, batch_dim: int = 0) -> int | None:
    """The number m of samples of a batch, read off the model's input as the optimizer does."""
    return batch_size(batch[0] if is_pair(batch) else batch, batch_dim)


def take(batches: Iterable[Any], count: int) -> list[Any]:
    """The first few batches.

    Raises:
        SettingsError: There are none.
    """
    if count < 1:
        raise SettingsError.of(
            given=f"count={count}", allowed="at least one batch", todo="choose 4 to 16"
        )
    taken = list(islice(batches, count))
    if not taken:
        raise SettingsError.of(
            given="no batches",
            allowed="an iterable with at least one batch, such as a DataLoader or [(x, y)]",
            todo="pass one; an iterator that was used up before is empty",
        )
    return taken


def plain_model(model: Any) -> nn.Module:
    """The user's model without the wrappers of DDP and torch.compile."""
    checks.require_model(model)
    return unwrap(model)


def copied(original: Copied) -> Copied:
    """A deep copy of a model, or of a model with its optimizer.

    A copy of a model that an optimizer is attached to is a plain one.

    Raises:
        ModelError: The model cannot be copied.
    """
    try:
        return copy.deepcopy(original)
    except (RuntimeError, TypeError) as error:
        raise ModelError.of(
            given=f"a model that cannot be copied ({error})",
            allowed="a model that copy.deepcopy takes: settings are tried on a copy",
            todo="do not keep outputs of a forward pass as attributes of the model, or call this "
            "before the first forward pass",
        ) from error


@contextmanager
def random_numbers_kept(model: nn.Module, batch: Any = None) -> Iterator[None]:
    """Leave the random number generators of torch, Python and NumPy as they are."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    numpy = sys.modules.get("numpy")  # who has not imported it has not drawn from it
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
