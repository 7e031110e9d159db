"""Encapsulation 1, what is remembered during a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from virtualgrad.errors import OperatorError
from virtualgrad.operators import Operator, StatefulOperator, apply_operator, identity
from virtualgrad.sites import Site


@dataclass
class Pass:
    """One forward pass: it numbers the uses of a parameter until a backward pass consumes it.

    The graph holds it, so it also ends when a graph is thrown away without a backward pass.
    ``loss_scale`` is the factor of the loss (a GradScaler's), ``ranks`` the number of processes
    that share the batch.
    """

    batch_size: int | None
    training: bool = True
    uses: dict[str, int] = field(default_factory=dict)
    consumed: bool = False
    loss_scale: float = 1.0
    ranks: int = 1


@dataclass(frozen=True)
class View:
    """A tensor behind which a tracked parameter is still itself: a view, a copy or a cast.

    ``strided`` has the same axes, with stride 0 where the parameter was expanded (a copy of an
    expanded tensor has lost them). Both are kept alive, so that an id stays its tensor's own.
    """

    parameter: str
    tensor: Tensor
    strided: Tensor


class Transform:
    """g -> T(g) at one site of one pass; ``sigma`` is its value, for a compiled one."""

    def __init__(
        self, operator: Operator, site: Site, current: Pass, sigma: Tensor | None = None
    ) -> None:
        if (
            sigma is not None
            and torch.compiler.is_compiling()
            and isinstance(operator, StatefulOperator)
        ):
            operator = operator.at(site, sigma)
        self.operator = operator
        self.site = site
        self.current = current

    def __call__(self, g: Tensor) -> Tensor:
        """Return T(g); the pass is consumed by it."""
        if not torch.compiler.is_compiling():
            self.current.consumed = True
        scale = self.current.loss_scale
        knows = getattr(self.operator, "loss_scale", None) is not None
        if scale == 1 or knows or self.operator is identity:
            return apply_operator(self.operator, g, self.site)
        if self.current.ranks > 1 and self.site.layout.sample_axis is None:
            raise OperatorError.of(
                given=f"{type(self.operator).__name__} at {self.site.key}, which has no samples, "
                f"on {self.current.ranks} processes",
                allowed="RMS there: other operators need the gradient of all processes at once",
                todo="leave such sites out with where=lambda site: site.has_sample_axis",
            )
        # T of the loss itself, in a precision that holds it; the result has the factor again.
        unscaled = g.to(torch.promote_types(g.dtype, torch.float32)) / scale
        return (apply_operator(self.operator, unscaled, self.site) * scale).to(g.dtype)

    def row_factor(self, g: Tensor, axis: int) -> Tensor | None:
        """Return f where T(g) is f g with one number per index of the axis; else None.

        If there is one, it stands for the call of this: the pass is consumed by it.
        """
        factor_of = getattr(self.operator, "row_factor", None)
        factor: Tensor | None = None if factor_of is None else factor_of(g, self.site, axis)
        if factor is not None:
            self.current.consumed = True
        return factor
