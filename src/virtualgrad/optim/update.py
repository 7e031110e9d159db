"""The update of the parameters: plain functions, no state of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from virtualgrad.operators.pieces import in_pieces


def decay(params: Sequence[Tensor], *, lr: float | Tensor, weight_decay: float) -> None:
    """Decoupled weight decay: theta <- (1 - lr * weight_decay) theta."""
    if weight_decay:
        torch._foreach_mul_(list(params), 1 - lr * weight_decay)


def descend(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor | None],
    *,
    lr: float | Tensor,
    momentum: float,
    has_sparse_grad: bool,
) -> list[Tensor | None]:
    """Virtual gradient descent: b <- momentum * b + v;  theta <- theta - lr * b.

    It is the update of torch.optim.SGD, by torch's own function, or by the one launch that this is
    without momentum, so that T = identity gives SGD to the last bit, and at its speed or above.

    Args:
        params: theta, changed in place.
        grads: v, the virtual gradients.
        buffers: b, changed in place; None for a parameter that has none yet.
        lr: alpha.
        momentum: 0 for none.
        has_sparse_grad: whether some of v are sparse.

    Returns:
        The buffers, where missing ones have been made.
    """
    made = list(buffers)
    if not momentum and not has_sparse_grad and not isinstance(lr, Tensor):
        torch._foreach_add_(*in_pieces(params, grads), alpha=-lr)
        return made
    sgd(
        list(params),
        list(grads),
        made,
        has_sparse_grad=has_sparse_grad,
        weight_decay=0.0,
        momentum=momentum,
        lr=lr,  # type: ignore[arg-type] # a tensor is allowed, as in torch.optim.SGD
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    return made
