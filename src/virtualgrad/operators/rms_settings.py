"""The numbers of Algorithm 1 at a site, and what both kinds of pass make of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, rsqrt

from virtualgrad.errors import HyperparameterError
from virtualgrad.operators.base import require_shape


class RMSSettings(NamedTuple):
    """The numbers of Algorithm 1 at one site: s, rho and eps; and the factor of the loss.

    ``together`` is one tensor that holds them in this order, on the device, where there is one.
    """

    scale: Any = 1.0  # numbers, or tensors in a compiled pass
    rho: Any = 0.9
    eps: Any = 1e-6
    loss_scale: Any = 1.0
    together: Tensor | None = None


def require_bools(**switches: Any) -> None:
    """Raise unless switches are True or False: any other string counts as true, "no" as well."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise HyperparameterError.of(
                given=f"{name}={value!r}",
                allowed="True or False",
                todo=f"choose one of them for {name}",
            )


def factor_by(r: Tensor, numbers: RMSSettings) -> Tensor:
    """S / sqrt(r + eps)."""
    factor: Tensor = numbers.scale * rsqrt(r + numbers.eps)
    return factor


ONE_PER_POSITION = (
    "pass share_positions=True, which keeps one r per output channel for inputs of any size, or "
    "keep the size of the inputs fixed"
)
SHARED_ALREADY = (
    "share_positions=True is on, so no size of the inputs is at fault: if this state was loaded, "
    "it was saved without share_positions, or of another layer; load one that was saved with it, "
    "or begin r anew with a new optimizer"
)


def require_same_shape(
    key: str, found: Sequence[int], kept: Sequence[int], *, shared: bool
) -> None:
    """Raise if the r of a site has another shape than its sigma needs now.

    ``shared``: whether share_positions is on, so that it is no way out.
    """
    require_shape(key, found, kept, SHARED_ALREADY if shared else ONE_PER_POSITION)


def warn_of_both_kinds(key: str) -> None:
    """Tell of a site that has had samples in one pass of a step, and none in another."""
    warnings.warn(
        f"sigma at {key} had samples in one pass of this step and none in another: its r is not "
        "exact in this step. Give single inputs a batch of one (x[None]), have the largest "
        "micro-batch first, or make a step in between",
        stacklevel=2,
    )
