"""Encapsulation 1, what is remembered during a forward pass."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling

from virtualgrad.errors import OperatorError, TransformError
from virtualgrad.operators import Operator, StatefulOperator, apply_operator, identity
from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients
from virtualgrad.sites import Site
from virtualgrad.virtual.asked import Asked


@dataclass
class Brought:
    """What backward passes have brought to a site through one graph that they kept.

    Attributes:
        epoch: of T, in which they did.
        g: their sum, each g once.
        times: leaf -> how many of them have pulled T(g) into it.
        is_look: all of them were ``torch.autograd.grad``.
    """

    epoch: int
    g: Tensor
    times: dict[int, int]
    is_look: bool


AROUND = ""
"""Among what was brought to sites: a graph around that of a reentrant checkpoint is kept."""


@dataclass
class Rerun:
    """A checkpoint that was run again.

    Attributes:
        node: its node, which the graph keeps alive.
        task: the backward pass that has run it last.
        uses: those of the forward pass before it was run again for the first time.
    """

    node: weakref.ref[Any]
    task: int
    uses: dict[str, int]


@dataclass
class Pass:
    """One forward pass: it numbers the uses of a parameter until a backward pass consumes it.

    The graph holds it, so it also ends when a graph is thrown away without a backward pass.
    ``loss_scale`` is the factor of the loss (a GradScaler's), ``ranks`` the number of processes
    that share the batch. ``kept`` has what backward passes have brought to a site while they kept
    the graph, ``reruns`` the checkpoints that they have run again, by the ids of their nodes.
    """

    batch_size: int | None
    training: bool = True
    uses: dict[str, int] = field(default_factory=dict)
    consumed: bool = False
    loss_scale: float = 1.0
    ranks: int = 1
    kept: dict[str, Brought] = field(default_factory=dict)
    reruns: dict[int, Rerun] = field(default_factory=dict)

    def begin_rerun(self, task: int) -> None:
        """Begin to run a part of it again, in a backward pass.

        A reentrant checkpoint makes its sites anew in each of them. Those of a second pass through
        a graph that was kept are the same uses once more; and that it is kept, the backward pass
        that such a checkpoint makes inside does not tell.
        """
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self.kept.setdefault(AROUND, Brought(-1, torch.empty(0), {}, is_look=False))
        node = torch._C._current_autograd_node()
        if not isinstance(node, BackwardCFunction):
            return
        known = self.reruns.get(id(node))
        if known is None or known.node() is not node:
            self.reruns[id(node)] = Rerun(weakref.ref(node), task, dict(self.uses))
        elif known.task != task:
            known.task = task
            self.uses.clear()
            self.uses.update(known.uses)


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
        if sigma is not None and is_compiling() and isinstance(operator, StatefulOperator):
            operator = operator.at(site, sigma)
        self.operator = operator
        self.site = site
        self.current = current

    def __call__(self, g: Tensor, asked: Asked | None = None, /) -> Tensor:
        """Return T(g); the pass is consumed by it."""
        if not is_compiling():
            refuse_batched(g, self.site)
            self.current.consumed = True
            if asked is not None:
                brought = self._brought()
                if brought is not None:
                    return self._of_further_pass(g, asked, brought)
                self._keep(g, asked)
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

    def for_layer(
        self, g: Tensor, channels: Channels | None, asked: Asked | None = None
    ) -> Incoming:
        """Return T(g), or g and f where T(g) is f g with one number per channel.

        Args:
            g: dJ/dsigma.
            channels: what the caller can use of them; None: nothing.
            asked: as in a call of this, for which it stands.
        """
        # Of its class: what stands for another operator by __getattr__ has a T of its own.
        make = getattr(type(self.operator), "for_layer", None)
        if make is None or (asked is not None and self._brought() is not None):
            return Incoming(self(g, asked))
        if is_legacy_batchedtensor(g) or is_batchedtensor(g):  # asked here, a frame less
            refuse_batched(g, self.site)
        self.current.consumed = True
        if asked is not None:
            self._keep(g, asked)
        made: Incoming = make(self.operator, g, self.site, channels)
        return made

    def norm_gradients(
        self, g: Tensor, norm: Norm, *, into: Tensor | None, asked: Asked | None = None
    ) -> NormGradients | None:
        """Return the gradients of a batch norm, weight's and bias' under T; None without kernels.

        If there are some, they stand for the call of this.
        """
        make = getattr(type(self.operator), "norm_gradients", None)
        if make is None or (asked is not None and self._brought() is not None):
            return None
        refuse_batched(g, self.site)
        made: NormGradients | None = make(self.operator, g, self.site, norm, into=into)
        if made is not None:
            self.current.consumed = True
            if asked is not None:
                self._keep(g, asked)
        return made

    # ---------------------------------------------------------------- a graph that is kept

    def _brought(self) -> Brought | None:
        """What this graph has brought to the site since the last commit, if it was kept."""
        brought = self.current.kept.get(self.site.key)
        if brought is None or brought.epoch != getattr(self.operator, "epoch", None):
            return None
        return brought

    def _keep(self, g: Tensor, asked: Asked) -> None:
        """Note g for a further pass through the graph, if there may be one (``retain_graph``)."""
        epoch = getattr(self.operator, "epoch", None)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if epoch is not None and (is_kept or AROUND in self.current.kept):
            times = dict.fromkeys(asked.leaves, 1)
            self.current.kept[self.site.key] = Brought(epoch, g.clone(), times, asked.is_look)

    def _of_further_pass(self, g: Tensor, asked: Asked, brought: Brought) -> Tensor:
        """Return T(g) of a further pass through the graph; what it brings is counted once.

        A parameter that is asked for again gets another g, which adds to the first. One that was
        not asked for yet gets the g that others have got. A look (``torch.autograd.grad``) beside
        ``backward()`` does not count: what was only looked at makes room for what is accumulated.
        """
        if asked.is_look and not brought.is_look:
            return self._by("same", g)
        if brought.is_look and not asked.is_look:
            self._by("again", g - brought.g, brought.g)
            brought.g, brought.is_look = g.clone(), False
            brought.times = dict.fromkeys(asked.leaves, 1)
            return self._by("same", g)
        before = max(brought.times.values())
        for leaf in asked.leaves:
            brought.times[leaf] = brought.times.get(leaf, 0) + 1
        if max(brought.times.values()) == before:
            return self._by("same", g)
        earlier, brought.g = brought.g, brought.g + g
        return self._by("again", g, earlier)

    def _by(self, method: str, *gradients: Tensor) -> Tensor:
        """What a method of the operator makes of gradients, without the loss's factor as above."""
        make = getattr(self.operator, method)
        scale = self.current.loss_scale
        if scale == 1 or getattr(self.operator, "loss_scale", None) is not None:
            made: Tensor = make(*gradients, self.site)
            return made
        dtype = gradients[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        made = make(*(g.to(wide) / scale for g in gradients), self.site)
        return (made * scale).to(dtype)


def refuse_batched(g: Tensor, site: Site) -> None:
    """Raise for many gradients in one (``is_grads_batched=True``): T has one state for them."""
    if is_legacy_batchedtensor(g) or is_batchedtensor(g):
        raise TransformError.of(
            given=f"torch.autograd.grad with is_grads_batched=True through {site.key}",
            allowed="one gradient at a time, or a batch of them for the model's input alone: the "
            "state of T is that of one",
            todo="take them one by one (retain_graph=True), or call optimizer.detach() before",
        )
