"""Encapsulation 1, what is remembered during a forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from virtualgrad.errors import OperatorError
from virtualgrad.operators import Operator, StatefulOperator, apply_operator, identity
from virtualgrad.operators.kernels_of_sums import Normalized
from virtualgrad.sites import Site


@dataclass
class Pass:
    """One forward pass: it numbers the uses of a parameter until a backward pass consumes it.

    The graph holds it, so it also ends when a graph is thrown away without a backward pass.
    ``loss_scale`` is the factor of the loss (a GradScaler's), ``ranks`` the number of processes
    that share the batch. ``kept`` has the g that backward passes have brought to a site while they
    kept the graph, and the epoch of T in which they did.
    """

    batch_size: int | None
    training: bool = True
    uses: dict[str, int] = field(default_factory=dict)
    consumed: bool = False
    loss_scale: float = 1.0
    ranks: int = 1
    kept: dict[str, tuple[int, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """A tensor behind which a tracked parameter is still itself: a view, a copy or a cast.

    ``strided`` has the same axes, with stride 0 where the parameter was expanded (a copy of an
    expanded tensor has lost them). ``owner`` is the tensor whose memory it shares, as far as a
    compiler can tell. All are kept alive, so that an id stays its tensor's own. ``made_by`` is the
    node that made the tensor, and ``version`` what torch counted by then; None of a view of the
    parameter's own memory, which torch lets nobody overwrite in a graph.
    """

    parameter: str
    tensor: Tensor
    strided: Tensor
    owner: Tensor
    made_by: Any = None
    version: int = 0

    def is_overwritten(self) -> bool:
        """Whether an op has changed the tensor in place, or what it is a view of.

        Another node has made it then. (The node stays where a value was changed unrecorded, under
        ``no_grad``: there the graph still has the parameter.)
        """
        return (
            self.made_by is not None
            and self.tensor._version != self.version
            and self.tensor.grad_fn is not self.made_by
        )


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
            earlier = self._earlier()
            self._keep(g, earlier)
            if earlier is not None:
                again: Tensor = self.operator.again(g, earlier, self.site)  # type: ignore[attr-defined]
                return again
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
        return self._in_its_place("row_factor", g, axis)

    def norm_sums(self, g: Tensor, normalized: Normalized) -> Tensor | None:
        """Return the gradients of a batch norm's weight and bias under T, as rows; else None.

        If there are some, they stand for the call of this, as a row's factor does.
        """
        return self._in_its_place("norm_sums", g, normalized)

    def _in_its_place(self, method: str, g: Tensor, how: Any) -> Tensor | None:
        """What a method of the operator makes of g without T(g); None where there is none."""
        made_by = getattr(self.operator, method, None)
        if made_by is None or self._earlier() is not None:
            return None
        made: Tensor | None = made_by(g, self.site, how)
        if made is not None:
            self.current.consumed = True
            self._keep(g, None)
        return made

    def _earlier(self) -> Tensor | None:
        """What this graph has brought to the site since the last commit, if it was kept."""
        kept = self.current.kept.get(self.site.key)
        if kept is None or kept[0] != getattr(self.operator, "epoch", None):
            return None
        return kept[1]

    def _keep(self, g: Tensor, earlier: Tensor | None) -> None:
        """Note g for a further pass through the graph, if there may be one (``retain_graph``)."""
        epoch = getattr(self.operator, "epoch", None)
        if epoch is not None and torch._C._autograd._get_current_graph_task_keep_graph():
            whole = g.clone() if earlier is None else earlier + g
            self.current.kept[self.site.key] = (epoch, whole)
