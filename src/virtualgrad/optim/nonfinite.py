"""NaN and infinite gradients: found before a step changes anything, and named by their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from virtualgrad.errors import NonFiniteError
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.base import nonfinite_indices


def nonfinite_places(
    operator: StatefulOperator, named: Iterable[tuple[str, Tensor]]
) -> Sequence[str]:
    """The sites with a NaN or infinite g, first one first; without any, such a parameter.

    What T has seen is asked first: of a NaN in one layer, all layers below have one in their
    gradients, and only the sites tell where backward met it first.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return []  # the host cannot look while a CUDA graph is captured or replayed
    sites = operator.witnesses()
    grads = [(name, p.grad) for name, p in named if p.grad is not None]
    values = [grad._values() if grad.is_sparse else grad for _, grad in grads]
    found = nonfinite_indices([*(witness for _, witness in sites), *values])
    places = [sites[index][0] for index in found if index < len(sites)]
    return places or [grads[index - len(sites)][0] for index in found[:1]]


def nonfinite_error(places: Sequence[str]) -> NonFiniteError:
    """The error for gradients that are NaN or infinite at these places."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return NonFiniteError.of(
        given=f"a NaN or infinite gradient at {places[0]}{more}",
        allowed="finite gradients; parameters and state are as they were before this step",
        todo="look at the inputs and the loss of this batch, lower lr, or pass "
        "nonfinite='skip' to skip such steps",
    )
