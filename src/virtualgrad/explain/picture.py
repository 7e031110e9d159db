"""The computational graph G of the paper's figures: values as nodes, ops as edges between them.

Read off the autograd graph of one forward pass. The nodes of one op are one value, and views are
transparent, so that the picture shows what the mathematics shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from virtualgrad.explain.forward import Recording
from virtualgrad.explain.record import OpRecord, is_leaf
from virtualgrad.sites import Site
from virtualgrad.sites.graph import Node, op_name, shape_of
from virtualgrad.sites.nodes import TRANSPARENT, Shape


@dataclass(frozen=True)
class Value:
    """One value of the graph.

    Attributes:
        id: its name in the picture's text.
        kind: ``"parameter"``, ``"sigma"`` (made by an op that takes a parameter), ``"value"``
            (any other), ``"input"`` (one that requires grad) or ``"output"``.
        title: name of the parameter, or of the op that made the value.
        shape: its shape.
    """

    id: str
    kind: str
    title: str
    shape: Shape


@dataclass(frozen=True)
class Edge:
    """An op leads from one value to another; T sits on the way back if it is transformed."""

    source: str
    target: str
    transformed: bool = False


@dataclass(frozen=True)
class Picture:
    """Values in the order of forward, and the edges between them."""

    values: tuple[Value, ...]
    edges: tuple[Edge, ...]


def draw(recording: Recording, transformed: tuple[Site, ...]) -> Picture:
    """The graph of a forward pass, with T where it acts."""
    return _Drawing(recording, transformed).picture()


class _Drawing:
    """Builds a picture value by value, in the order of forward."""

    def __init__(self, recording: Recording, transformed: tuple[Site, ...]) -> None:
        self.recording = recording
        self.chosen = {(site.key, name) for site in transformed for name in site.parameters}
        self.names: Mapping[int, str] = {id(p): name for name, p in recording.parameters.items()}
        self.values: dict[str, Value] = {}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.made_by: dict[Node, str] = {}  # autograd node -> id of the value that it made

    def picture(self) -> Picture:
        """Draw all of it."""
        ops = [*self.recording.records, *self._unrecorded()]
        ops.sort(key=lambda op: op.sequence)
        ids = [f"{'sigma' if op.sites else 'value'}{number}" for number, op in enumerate(ops)]
        for value, op in zip(ids, ops, strict=True):  # all of them first: they are looked up below
            self.made_by |= dict.fromkeys(op.nodes, value)
        for value, op in zip(ids, ops, strict=True):
            self._draw_op(value, op)
        self._draw_outputs()
        return Picture(tuple(self.values.values()), tuple(self.edges.values()))

    def _unrecorded(self) -> list[OpRecord]:
        """Ops that only the graph shows: a custom autograd.Function, a hook's."""
        known = {node for record in self.recording.records for node in record.nodes}
        return [
            OpRecord(op_name(node), shape_of(node, 0), (), (node,), node._sequence_nr())
            for node in self.recording.nodes
            if node not in known and not is_leaf(node) and node.name() not in TRANSPARENT
        ]

    def _draw_op(self, value: str, op: OpRecord) -> None:
        for site in op.sites:
            for name in site.parameters:
                self._connect(self._parameter(name), value, (site.key, name) in self.chosen)
        self._add(Value(value, "sigma" if op.sites else "value", op.op, op.shape))
        for node in op.nodes:
            for following, _ in node.next_functions:
                self._connect(self._source(following), value)

    def _draw_outputs(self) -> None:
        outputs = self.recording.outputs
        for number, output in enumerate(outputs):
            title = "output" if len(outputs) == 1 else f"output {number}"
            self._add(Value(f"output{number}", "output", title, output.shape))
            self._connect(self._source(output.node), f"output{number}")

    def _source(self, node: Node | None) -> str | None:
        """The value that a node made, or whose view it made."""
        while node is not None and node not in self.made_by:
            if is_leaf(node):
                return self._leaf(node)
            node = node.next_functions[0][0]  # every other node left is transparent
        return None if node is None else self.made_by[node]

    def _leaf(self, node: Node) -> str:
        name = self.names.get(id(node.variable))
        if name is not None:
            return self._parameter(name)
        value = f"input{sum(v.kind == 'input' for v in self.values.values())}"
        self.made_by[node] = value
        self._add(Value(value, "input", "input", tuple(node.variable.shape)))
        return value

    def _parameter(self, name: str) -> str:
        shape = tuple(self.recording.parameters[name].shape)
        value = f"theta{list(self.recording.parameters).index(name)}"
        self._add(Value(value, "parameter", name, shape))
        return value

    def _add(self, value: Value) -> None:
        self.values.setdefault(value.id, value)

    def _connect(self, source: str | None, target: str, transformed: bool = False) -> None:
        if source is not None and source != target:  # not within the nodes of one op
            self.edges.setdefault((source, target), Edge(source, target, transformed))
