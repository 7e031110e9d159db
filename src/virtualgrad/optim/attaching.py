"""The thread from a model to its optimizer: weak, as the model must not keep its optimizer alive.

A model outlives its optimizers, and one may be dropped without ``detach()``. Calls of the model
that are still under way then find no optimizer, and do nothing.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from torch import nn

from virtualgrad.optim import checks
from virtualgrad.optim.processes import refuse_join
from virtualgrad.sites import Where, every_linear_site
from virtualgrad.virtual import Attachment, Intercept

if TYPE_CHECKING:
    from virtualgrad.optim.descent import VirtualGradientDescent


def attach(
    optimizer: VirtualGradientDescent, model: nn.Module, where: Where | None, batch_dim: int
) -> Attachment:
    """Let a model's ops leave virtual gradients to an optimizer, as long as that lives.

    Args:
        optimizer: has its parameter groups already.
        model: as the user gave it.
        where: which of the linear sites T acts on; None for all.
        batch_dim: the axis of the inputs that counts samples.
    """
    this = weakref.ref(optimizer)

    def group_of(name: str) -> int:
        optimizer = this()
        return -1 if optimizer is None else optimizer._group_index[name]

    intercept = Intercept(
        dict(optimizer._named_parameters()),
        optimizer.operator,
        where=where or every_linear_site,
        group_of=group_of,
        batch_dim=batch_dim,
    )
    intercept.passes.before = functools.partial(_begin_pass, this)
    attachment = Attachment(model, intercept)
    attachment.cleared = functools.partial(_forget, this)
    checks.claim(optimizer._named_parameters(), attachment)
    return attachment


def detach_at_the_end(optimizer: VirtualGradientDescent, attachment: Attachment) -> None:
    """Have a model put back when its optimizer has gone, if it is still there.

    (A strong reference here would keep alive a model that has its optimizer, and so both.)
    """
    weakref.finalize(optimizer, _detach, weakref.ref(attachment))


def _detach(this: weakref.ref[Attachment]) -> None:
    attachment = this()
    if attachment is not None:
        attachment.detach()


def _begin_pass(this: weakref.ref[VirtualGradientDescent]) -> None:
    """Before a forward pass: read the factor of the loss, and forget what was thrown away.

    ``p.grad = None`` throws gradients away without telling the optimizer. (Shards have none until
    FSDP2 reduces the gradients, which it may be told to do for the last micro-batch only.)
    """
    optimizer = this()
    if optimizer is None:
        return
    if optimizer._transaction.ranks is not None:
        refuse_join()
    if optimizer.grad_scaler is not None:
        optimizer._announce_loss_scale()
    if not optimizer._transaction.has_prepared() or optimizer._attached().intercept.is_sharded:
        return
    if all(p.grad is None for _, p in optimizer._named_parameters()):
        optimizer._transaction.rollback()


def _forget(this: weakref.ref[VirtualGradientDescent]) -> None:
    """Forget what backward prepared: the model's gradients were cleared, to None or zeros."""
    optimizer = this()
    if optimizer is not None:
        optimizer._transaction.rollback()
