r"""The paper's first-order methods (its section "Related Work"), formula by formula.

Each maps a gradient g and a state to the direction p = T(g) of the variables and the new state.
They serve as references in tests, and on sigma as operators: there T(g) is -p, since a virtual
gradient is subtracted. The state starts empty, which stands for zeros.

One misprint is mended: the paper divides Adam's moments by 1 - rho^t with t = 0 in the first step;
here t counts from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.base import SiteState, StatefulOperator, require_shape
from virtualgrad.sites import Site

Method = Callable[..., tuple[Tensor, SiteState]]


def sgd(g: Tensor, state: SiteState) -> tuple[Tensor, SiteState]:
    """Return p = -g."""
    return -g, state


def momentum(g: Tensor, state: SiteState, *, c: float = 0.9) -> tuple[Tensor, SiteState]:
    """Update m <- c m + g and return p = -m."""
    m = c * state["m"] + g if state else g.clone()
    return -m, {"m": m}


def rmsprop(
    g: Tensor, state: SiteState, *, rho: float = 0.9, delta: float = 1e-6
) -> tuple[Tensor, SiteState]:
    """Update r <- rho r + (1 - rho) g*g and return p = -g / sqrt(delta + r)."""
    r = (1 - rho) * g * g + (rho * state["r"] if state else 0)
    return -g / torch.sqrt(delta + r), {"r": r}


def adam(
    g: Tensor, state: SiteState, *, rho1: float = 0.9, rho2: float = 0.999, delta: float = 1e-8
) -> tuple[Tensor, SiteState]:
    """Adam with delta inside the root, as the paper writes it.

    s <- rho1 s + (1 - rho1) g;  r <- rho2 r + (1 - rho2) g*g;
    p = -(s / (1 - rho1^t)) / sqrt(delta + r / (1 - rho2^t)), t = 1, 2, ...
    """
    s = (1 - rho1) * g + (rho1 * state["s"] if state else 0)
    r = (1 - rho2) * g * g + (rho2 * state["r"] if state else 0)
    t = (state["t"] if state else torch.zeros((), dtype=torch.float64)) + 1
    # .to: 1 - rho^t is worth its float64 digits, but must not lift the dtype of p.
    s_hat = s / (1 - rho1**t).to(s.dtype)
    r_hat = r / (1 - rho2**t).to(r.dtype)
    return -s_hat / torch.sqrt(delta + r_hat), {"s": s, "r": r, "t": t}


class FirstOrder(StatefulOperator):
    """A first-order method as an operator on sigma: T(g) = -p, with a state of sigma's own shape.

    The state has an entry per sample as well, so the batch size must not change. (The paper's own
    operator, :class:`virtualgrad.operators.RMS`, averages over samples and has no such limit.)
    """

    def __init__(self, method: Method, **hyperparameters: Any) -> None:
        super().__init__()
        self.method = method
        self.hyperparameters = hyperparameters
        self._prepared: dict[str, SiteState] = {}

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return -p for g, and prepare the new state."""
        state = self._prepared.get(site.key, self.state.get(site.key, {}))
        for tensor in state.values():
            if tensor.dim():
                require_shape(site.key, g.shape, tensor.shape, "keep the batch size fixed")
        p, self._prepared[site.key] = self.method(g, state, **self.hyperparameters)
        return -p

    def commit(self) -> None:
        """Make the prepared state the state."""
        self.state.update(self._prepared)
        self.rollback()

    def rollback(self) -> None:
        """Forget the prepared state."""
        self._prepared = {}

    def has_prepared(self) -> bool:
        """Whether a backward pass has reached a site since the last commit."""
        return bool(self._prepared)


def on_sigma(method: Method, **hyperparameters: Any) -> FirstOrder:
    """A first-order method as an operator on sigma, as in ``on_sigma(momentum, c=0.9)``."""
    return FirstOrder(method, **hyperparameters)
