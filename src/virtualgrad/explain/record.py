"""Record the ops of a forward pass, with the interception that the optimizer uses.

The same interception means the same sites under the same keys; the ops themselves run plainly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from virtualgrad.operators import identity
from virtualgrad.sites import Layout, Site
from virtualgrad.sites.graph import Node
from virtualgrad.sites.nodes import TRANSPARENT, Shape
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.intercept import Intercept
from virtualgrad.virtual.ops import tensors_in

FUSED_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


@dataclass(frozen=True, eq=False)
class OpRecord:
    """One run of an op: an edge f of the paper's computational graph, and the value it makes.

    Attributes:
        op: name of the op.
        shape: shape of the value.
        sites: the uses of parameters: one site of those in which the op is linear, one of the
            others, or none.
        nodes: the autograd nodes that the run has made.
        sequence: when it ran, counted in autograd nodes.
    """

    op: str
    shape: Shape
    sites: tuple[Site, ...]
    nodes: tuple[Node, ...]
    sequence: int

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters that the op takes directly."""
        return {name for site in self.sites for name in site.parameters}


class Recorder(Intercept):
    """An interception that only looks.

    Args:
        parameters: name -> parameter.
        batch_dim: the axis of the inputs that counts samples.

    Attributes:
        records: the ops that made a value, in order; views are none.
        reasons: (key of a site, parameter) -> why the op is not linear in it there.
        without_grad: parameters that were met while gradients were switched off.
    """

    sees_all_ops = True

    def __init__(self, parameters: Mapping[str, Tensor], *, batch_dim: int) -> None:
        super().__init__(parameters, identity, batch_dim=batch_dim)
        self.records: list[OpRecord] = []
        self.reasons: dict[tuple[str, str], str] = {}
        self.without_grad: set[str] = set()
        self._times_run: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one torch function as it is, and look at the parameters that it takes."""
        result = super().__torch_function__(func, types, args, kwargs)
        if not torch.is_grad_enabled() and tensors_in(result):
            self.without_grad.update(self._names_in((args, kwargs)))
        return result

    def _run_site(self, call: Call) -> Tensor:
        sequence = _get_sequence_nr()
        sigma = call.plain()
        shape = tuple(sigma.shape)
        sites = [self._site(call, shape)]
        found = self._names_in((call.args, call.kwargs))
        left = [name for name in found if name not in sites[0].parameters]
        if left:  # such as b in a / b
            sites.append(self.nonlinear_site(call.rule.op, left, shape))
        nodes = nodes_since(sequence, [sigma])
        self.records.append(OpRecord(call.rule.op, shape, tuple(sites), nodes, sequence))
        return sigma

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        sequence = _get_sequence_nr()
        found = self._names_in((args, kwargs))
        result = func(*args, **kwargs)
        made = [tensor for tensor in tensors_in(result) if tensor.grad_fn is not None]
        nodes = nodes_since(sequence, made)
        if found or any(node.name() not in TRANSPARENT for node in nodes):
            self._record_other(function_name(func), found, made, nodes, sequence)
        return result

    def _record_other(
        self,
        op: str,
        found: list[str],
        made: Sequence[Tensor],
        nodes: tuple[Node, ...],
        sequence: int,
    ) -> None:
        if not nodes:  # nothing was computed: weight.shape, weight.requires_grad_()
            return
        shape = tuple(made[0].shape)
        sites = (self.nonlinear_site(op, found, shape),) if found else ()
        self.records.append(OpRecord(op, shape, sites, nodes, sequence))

    def _names_in(self, arguments: Any) -> list[str]:
        """Tracked parameters among the arguments, each as often as it stands there."""
        names = (self._name_of(tensor) for tensor in tensors_in(arguments))
        return [name for name in names if name is not None]

    def nonlinear_site(
        self, op: str, found: Sequence[str], shape: Shape, reason: str | None = None
    ) -> Site:
        """A site at which the op is not linear, and the reason noted.

        Its key ends in ``~``: the optimizer has no such site, and counts its own without it.
        """
        names = tuple(dict.fromkeys(found))
        path = self.path or ""
        short = ", ".join(name.removeprefix(f"{path}.") for name in names)
        key = f"{path or '(model)'}:{op}({short})~"
        number = self._times_run[key]
        self._times_run[key] += 1
        key = key if number == 0 else f"{key}#{number}"
        for name in names:
            self.reasons[key, name] = reason or reason_of(op, twice=found.count(name) > 1)
        layout = Layout(shape, frozenset(), None, 1)
        return Site(key, op, names, ("weight",) * len(names), False, shape, layout)


def nodes_since(sequence: int, made: Iterable[Tensor]) -> tuple[Node, ...]:
    """The autograd nodes behind some tensors that are not older than ``sequence``, in order."""
    seen: set[Node] = set()
    stack: list[Node] = [tensor.grad_fn for tensor in made]
    while stack:
        node = stack.pop()
        if node is None or node in seen or is_leaf(node) or node._sequence_nr() < sequence:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
    return tuple(sorted(seen, key=lambda node: node._sequence_nr()))


def is_leaf(node: Node) -> bool:
    """Whether a node stands for a leaf of the graph: a parameter, or an input that needs grad."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def function_name(func: Any) -> str:
    """``torch.softmax``, ``Tensor.__pow__``, ``Tensor.real.__get__`` -> softmax, pow, real."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = func.__self__.__name__
    return str(name).strip("_")


def reason_of(op: str, *, twice: bool) -> str:
    """Why no T acts where an op takes a parameter."""
    if op in FUSED_RECURRENT:
        return (
            f"one fused multi-step kernel ({op!r}), not linear in it; the same network made of "
            "cells (nn.LSTMCell, nn.GRUCell, nn.RNNCell) has linear sites"
        )
    if twice:
        return f"op {op!r} takes it twice, so it is not linear in it"
    return f"op {op!r} is not linear in it, or not known to be"
