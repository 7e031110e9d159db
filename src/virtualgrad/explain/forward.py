"""One forward pass that finds the sites of a model and leaves the model as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from virtualgrad.explain.record import OpRecord, Recorder, is_leaf
from virtualgrad.sites import Site
from virtualgrad.sites.graph import GraphSite, Node, find_graph_sites, op_name, shape_of, walk
from virtualgrad.virtual import Attachment, attachments_of, named_parameters, unwrap
from virtualgrad.virtual.ops import tensors_in


@dataclass(frozen=True, eq=False)
class Output:
    """A tensor that the model returns, and the autograd node that made it."""

    node: Node
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """What one forward pass has shown.

    Attributes:
        parameters: name -> parameter; a tied one once, under its first name.
        records: every op that made a value, in the order of forward.
        outputs: the returned tensors that require grad.
        reasons: (key of a site, parameter) -> why the op is not linear in it there.
        unmet: parameter that no op takes -> why.
    """

    parameters: dict[str, Tensor]
    records: tuple[OpRecord, ...]
    outputs: tuple[Output, ...]
    reasons: dict[tuple[str, str], str]
    unmet: dict[str, str]

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, linear or not, in the order of forward."""
        return tuple(site for record in self.records for site in record.sites)

    @property
    def nodes(self) -> list[Node]:
        """The autograd graph, with values that no output depends on."""
        return _graph(self.outputs, self.records)


def record_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, batch_dim: int
) -> Recording:
    """Run a model once, and account for every parameter."""
    model = unwrap(model)
    parameters = named_parameters(model)
    recorder = Recorder(parameters, batch_dim=batch_dim)
    outputs = _outputs(_run(model, recorder, args, kwargs))
    nodes = _graph(outputs, recorder.records)
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    records = _completed(recorder, find_graph_sites(nodes, trainable))
    met = {name for record in records for name in record.parameters}
    unmet = {
        name: _why_unmet(name, parameter, recorder, nodes)
        for name, parameter in parameters.items()
        if name not in met
    }
    return Recording(parameters, records, outputs, recorder.reasons, unmet)


def _run(model: nn.Module, recorder: Recorder, args: Any, kwargs: Any) -> Any:
    others = attachments_of(model)
    with (
        # First on, last off: detaching would take attachments that are paused off the model, too.
        Attachment(model, recorder),
        _paused(others),
        _preserved(model, (args, kwargs)),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),  # compiled code hides its ops
    ):
        return model(*args, **kwargs)


@contextmanager
def _paused(attachments: Sequence[Attachment]) -> Iterator[None]:
    """Let attached optimizers see nothing of this forward pass."""
    for attachment in attachments:
        attachment.active = False
    try:
        yield
    finally:
        for attachment in attachments:
            attachment.active = True


@contextmanager
def _preserved(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Keep buffers, attributes of modules and random number generators as they are.

    Buffers are swapped for copies instead of being written back: a graph of the user's that has
    saved one of them for its backward pass stays valid.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    copies = {id(b): b.detach().clone() for b in model.buffers()}
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    cuda = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    python_random = random.getstate()
    try:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies[id(buffer)]
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python_random)
        for module, own_attributes, own_buffers in zip(modules, attributes, buffers, strict=True):
            for current, saved in ((vars(module), own_attributes), (module._buffers, own_buffers)):
                current.clear()
                current.update(saved)


def _outputs(result: Any) -> tuple[Output, ...]:
    tensors = tensors_in(vars(result) if is_dataclass(result) else result)
    return tuple(
        Output(get_gradient_edge(tensor).node, tuple(tensor.shape))
        for tensor in tensors
        if tensor.requires_grad
    )


def _graph(outputs: Sequence[Output], records: Sequence[OpRecord]) -> list[Node]:
    return walk([*(o.node for o in outputs), *(node for r in records for node in r.nodes)])


def _completed(recorder: Recorder, in_graph: Sequence[GraphSite]) -> tuple[OpRecord, ...]:
    """The records, with each use of a parameter that only the autograd graph shows.

    The interception sees the ops that Python calls by torch's functions; the graph sees all, such
    as a custom autograd.Function. No T can act there, whether the op is linear or not.
    """
    records = list(recorder.records)
    owner = {node: i for i, record in enumerate(records) for node in record.nodes}
    for found in in_graph:
        node, op = found.node, op_name(found.node)
        if node not in owner:
            owner[node] = len(records)
            sequence = node._sequence_nr()
            records.append(OpRecord(op, shape_of(node, 0), (), (node,), sequence))
        record = records[owner[node]]
        names = [s.parameter for s in found.slots if s.parameter not in record.parameters]
        if names:
            reason = f"T cannot be put into op {op!r}, which only the autograd graph shows"
            site = recorder.nonlinear_site(op, names, record.shape, reason)
            records[owner[node]] = replace(record, sites=(*record.sites, site))
    return tuple(sorted(records, key=lambda record: record.sequence))


def _why_unmet(name: str, parameter: Tensor, recorder: Recorder, nodes: Sequence[Node]) -> str:
    if not parameter.requires_grad:
        return "frozen (requires_grad=False)"
    if any(is_leaf(node) and node.variable is parameter for node in nodes):
        return "returned by the model as it is, or viewed; no op computes with it"
    if name in recorder.without_grad:
        return (
            "used only while gradients are off (torch.no_grad, or a checkpoint with "
            "use_reentrant=True)"
        )
    return "not used in this forward"
