"""Find the sites of a recorded autograd graph: the set V(theta -> sigma) of the paper.

Walk from the loss to the parameters. A node with a slot that leads to a parameter, directly or
through transparent nodes, makes a sigma; :mod:`.nodes` says whether it is linear in that slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from virtualgrad.sites.nodes import LINEAR, TRANSPARENT, Shape
from virtualgrad.sites.site import Layout, Site, read_layout
from virtualgrad.sites.views import Node, offset, shape_of, unexpanded

NORMS = {"batch_norm", "group_norm", "layer_norm", "rms_norm"}
"""Ops whose first operand is what they normalize; the others may be missing."""

__all__ = [
    "GraphSite",
    "Node",
    "Slot",
    "consumers_of",
    "find_graph_sites",
    "follow",
    "op_name",
    "shape_of",
    "walk",
]


@dataclass(frozen=True, eq=False)
class Slot:
    """One use of a parameter: slot ``index`` of a node leads to it.

    Attributes:
        index: position in the node's ``next_functions``.
        chain: the transparent nodes in between with the output used of each, op first; the
            parameter's own ``AccumulateGrad`` comes last.
        parameter: name of the parameter.
        role: what it is to the op, or None where the op is not linear in it.
    """

    index: int
    chain: tuple[tuple[Node, int], ...]
    parameter: str
    role: str | None


@dataclass(frozen=True, eq=False)
class GraphSite:
    """A node that takes parameters directly, with the site that each kind of use makes."""

    node: Node
    slots: tuple[Slot, ...]
    linear: Site | None
    nonlinear: Site | None


def find_graph_sites(
    roots: Iterable[Node],
    parameters: Mapping[str, Tensor],
    *,
    batch_size: int | None = None,
    batch_dim: int = 0,
) -> list[GraphSite]:
    """All sites of a graph in the order in which forward made them.

    Args:
        roots: the nodes to start from, such as ``[loss.grad_fn]``.
        parameters: name -> parameter.
        batch_size: number of samples; None to take the axis ``batch_dim`` of every sigma that
            comes from data for the sample axis.
        batch_dim: the axis that counts samples.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    nodes = walk(roots)
    consumers = consumers_of(nodes)
    counts: dict[str, int] = {}
    sites = []
    for node in sorted(nodes, key=lambda n: n._sequence_nr()):
        if node.name() in TRANSPARENT or _repeats_for_norm(node, consumers.get(node, [])):
            continue
        slots = tuple(_slots(node, names))
        if not slots:
            continue
        read = _Reader(node, slots, consumers.get(node, []), batch_size, batch_dim, counts)
        sites.append(GraphSite(node, slots, read.linear(), read.nonlinear()))
    return sites


def walk(roots: Iterable[Node]) -> list[Node]:
    """All nodes that the roots lead to, each once."""
    seen: dict[Node, None] = {}
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(following for following, _ in node.next_functions if following is not None)
    return list(seen)


def consumers_of(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Node -> the nodes that its output goes into."""
    consumers: dict[Node, list[Node]] = {}
    for node in nodes:
        for following, _ in node.next_functions:
            if following is not None:
                consumers.setdefault(following, []).append(node)
    return consumers


def follow(edge: tuple[Node, int], names: Mapping[int, str], through: frozenset[str]) -> Any:
    """Follow transparent nodes to a parameter: (chain, name), or None if they lead elsewhere."""
    chain = []
    node, output = edge
    while node is not None:
        chain.append((node, output))
        variable = getattr(node, "variable", None)  # AccumulateGrad's parameter
        if variable is not None:
            name = names.get(id(variable))
            return None if name is None else (tuple(chain), name)
        if node.name() not in through:
            return None
        node, output = node.next_functions[0]
    return None


def _slots(node: Node, names: Mapping[int, str]) -> Iterable[Slot]:
    rule = LINEAR.get(node.name())
    through = TRANSPARENT
    if rule is not None and rule.op == "batch_norm":
        through |= {"RepeatBackward0"}  # instance norm is a batch norm of repeated weights
    found = []
    for index, edge in enumerate(node.next_functions):
        reached = follow(edge, names, through)
        if reached is not None:
            found.append((index, *reached))
    used = [name for _, _, name in found]
    for index, chain, name in found:
        # The same parameter twice in one op, as in W @ W: not linear.
        linear = rule is not None and used.count(name) == 1 and not _is_max_bag(node)
        yield Slot(index, chain, name, rule.role(index) if linear and rule else None)


def _repeats_for_norm(node: Node, consumers: list[Node]) -> bool:
    """Whether a node repeats a weight for instance norm, which is then transparent."""
    rules = [LINEAR.get(consumer.name()) for consumer in consumers]
    norms = [rule is not None and rule.op == "batch_norm" for rule in rules]
    return node.name() == "RepeatBackward0" and bool(norms) and all(norms)


def _is_max_bag(node: Node) -> bool:
    return node.name() == "EmbeddingBagBackward0" and bool(node._saved_mode == 2)


class _Reader:
    """Reads off a node and its neighbours what sigma is."""

    def __init__(  # noqa: PLR0917
        self,
        node: Node,
        slots: tuple[Slot, ...],
        consumers: list[Node],
        batch_size: int | None,
        batch_dim: int,
        counts: dict[str, int],
    ) -> None:
        self.node = node
        self.slots = slots
        self.consumers = consumers
        self.batch_size = batch_size
        self.batch_dim = batch_dim
        self.counts = counts
        self.rule = LINEAR.get(node.name())
        self.shape = shape_of(node, 0)

    def linear(self) -> Site | None:
        slots = [slot for slot in self.slots if slot.role is not None]
        return self._site(slots, linear=True) if slots else None

    def nonlinear(self) -> Site | None:
        slots = [slot for slot in self.slots if slot.role is None]
        return self._site(slots, linear=False) if slots else None

    def _site(self, slots: list[Slot], *, linear: bool) -> Site:
        parameters = tuple(slot.parameter for slot in slots)
        op = self.rule.op if self.rule is not None else op_name(self.node)
        key = f"{op}({', '.join(slot.parameter + offset(slot.chain) for slot in slots)})"
        number = self.counts.get(key, 0)
        self.counts[key] = number + 1
        return Site(
            key=key if number == 0 else f"{key}#{number}",
            op=op,
            parameters=parameters,
            roles=tuple(slot.role or "weight" for slot in slots),
            linear=linear,
            shape=self.shape,
            layout=self._layout(slots) if linear else Layout(self.shape, frozenset(), None, 1),
        )

    def _layout(self, slots: list[Slot]) -> Layout:
        assert self.rule is not None
        logical = self._logical_shape(slots)
        axes: set[int] = set()
        for slot in slots:
            operand = self._operand_shape(slot, logical)
            axes |= self.rule.axes(self.node, slot.index, operand, logical)
        if self._is_alone():  # no samples, but those along which a parameter was expanded
            axes |= self._axes_of_nonlinear(logical)
        return read_layout(
            logical,
            frozenset(axes),
            batch_size=self.batch_size,
            batch_dim=self.batch_dim,
            foldable=self.rule.foldable and not self._is_alone(),
        )

    def _axes_of_nonlinear(self, logical: Shape) -> set[int]:
        """Axes of sigma along which parameters differ in which the op is never linear.

        (A divisor, or what a norm takes: they broadcast. Not a parameter that is used twice.)
        """
        assert self.rule is not None
        slots = [slot for slot in self.slots if self.rule.role(slot.index) is None]
        shapes = [self._operand_shape(slot, logical) for slot in slots]
        return {
            len(logical) - len(shape) + axis
            for shape in shapes
            for axis, size in enumerate(shape)
            if size > 1
        }

    def _is_unbatched(self) -> bool:
        """Whether a batch of products has one only, as einsum without batch axes makes it."""
        return bool(self.node.name() == "BmmBackward0") and self.shape[0] == 1

    def _logical_shape(self, slots: list[Slot]) -> Shape:
        """Sigma's shape as the op's caller sees it, where a composite op reshapes its result."""
        if self._is_unbatched():
            return self.shape[1:]
        rows = self._rows_as_given(slots)
        if rows != self.shape[:1]:
            return (*rows, *self.shape[1:])
        channels = self._channels_of_instances(slots)
        if channels:
            return (self.shape[1] // channels, channels, *self.shape[2:])
        if len(self.consumers) != 1:
            return self.shape
        consumer = self.consumers[0]
        reshaped_by_matmul = consumer.name() == "UnsafeViewBackward0" and len(self.shape) > 2
        return shape_of(consumer, 0) if reshaped_by_matmul else self.shape

    def _channels_of_instances(self, slots: list[Slot]) -> int:
        """How many channels an instance norm has; 0 of any other op.

        It is a batch norm of one image, (1, N*C, ...), with its weights repeated N times.
        """
        if self.rule is None or self.rule.op != "batch_norm":
            return 0
        for slot in slots:
            for (node, _), behind in zip(slot.chain, slot.chain[1:], strict=False):
                if node.name() == "RepeatBackward0":
                    return shape_of(*behind)[-1]
        return 0

    def _rows_as_given(self, slots: list[Slot]) -> Shape:
        """The axes that matmul made rows of, where the left factor is an expanded parameter.

        (Rows of data are folded as :func:`read_layout` finds them.)
        """
        for slot in slots:
            names = [node.name() for node, _ in slot.chain]
            if self._is_left(slot) and "ExpandBackward0" in names[1:]:
                rows, given = (shape_of(*link) for link in slot.chain[:2])
                if len(rows) == 2 and given[-1:] == rows[-1:] and prod(given) == prod(rows):
                    return given[:-1]
        return self.shape[:1]

    def _is_left(self, slot: Slot) -> bool:
        return self.rule is not None and self.rule.left == slot.index

    def _operand_shape(self, slot: Slot, logical: Shape) -> Shape:
        """Shape of the parameter as the op's caller sees it, with size 1 where it was expanded."""
        shape = shape_of(*slot.chain[0])
        if self._is_unbatched():
            shape = shape[1:]
        elif logical != self.shape and self._is_flattened(slot, shape):
            split = len(logical) - len(self.shape) + 1
            shape = (*logical[:split], *shape[1:])
        return unexpanded(slot.chain, shape)

    def _is_flattened(self, slot: Slot, shape: Shape) -> bool:
        """Whether matmul has flattened what is in a slot, as it did sigma: rows, or a batch."""
        is_factor = self._is_left(slot) or self.node.name() == "BmmBackward0"
        return is_factor and shape[:1] == self.shape[:1]

    def _is_alone(self) -> bool:
        """Whether sigma is made of parameters only: no samples but those they were expanded to."""
        op = None if self.rule is None else self.rule.op
        edges = [node for node, _ in self.node.next_functions]
        if op in NORMS and self.slots[0].index == 0:  # of a parameter; they may lack weight or bias
            edges = [node for node in edges if node is not None]
        return len(self.slots) == len(edges) and op not in {"where", "masked_fill"}


def op_name(node: Node) -> str:
    """``"SoftmaxBackward0"`` -> ``"softmax"``: a readable name for any node."""
    name: str = node.name()
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward").lower()
