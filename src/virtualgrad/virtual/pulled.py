"""Encapsulation 2, the passes: g at every site of a recorded graph, and T(g) back to parameters.

Both go through the graph as a gradient does: what hooks on sigma make of g is what T gets, and a
hook on a parameter, or on a view of it, gets the sum of all that arrives there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from virtualgrad.operators import Operator, apply_operator
from virtualgrad.sites import Where
from virtualgrad.sites.graph import GraphSite, Slot


def gradients_at(loss: Tensor, sites: list[GraphSite]) -> list[list[Tensor | None]]:
    """G = dJ/dsigma at every site: one list per node, with an entry per output of the node."""
    edges, owners = [], []
    for position, site in enumerate(sites):
        for output in range(max(1, len(site.node._input_metadata))):
            edges.append(GradientEdge(site.node, output))
            owners.append(position)
    arrived: list[list[Tensor | None]] = [[] for _ in sites]
    if not edges:
        return arrived
    # What is handed out at a node that runs is what came before the hooks on sigma have altered it;
    # the node itself is told what they have made of it. (At one that does not run they are done.)
    told: dict[int, list[Tensor | None]] = {}
    handles = [
        site.node.register_prehook(functools.partial(_note, told, position))
        for position, site in enumerate(sites)
    ]
    try:
        gradients = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for position, gradient in zip(owners, gradients, strict=True):
        arrived[position].append(gradient)
    return [told.get(position, handed_out) for position, handed_out in enumerate(arrived)]


def _note(
    told: dict[int, list[Tensor | None]], position: int, gradients: tuple[Tensor | None, ...]
) -> None:
    told[position] = list(gradients)


def pull_back_all(
    sites: list[GraphSite],
    arrived: list[list[Tensor | None]],
    operator: Operator,
    where: Where,
    parameters: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Sum of all pull-backs, for the parameters that at least one T acts on."""
    plans = [_chosen(site, where) for site in sites]
    touched = {slot.parameter for chosen in plans for slot in chosen}
    shares: list[tuple[GradientEdge, Tensor]] = []
    reached: set[str] = set()
    # Backward order, as the engine goes: operators may depend on it (their state does not).
    for site, gradients, chosen in reversed(list(zip(sites, arrived, plans, strict=True))):
        if all(g is None for g in gradients):
            continue
        plain = [s for s in site.slots if s not in chosen and s.parameter in touched]
        pieces = []
        if plain:
            pieces.append((plain, gradients))
        if chosen and gradients[0] is not None:
            assert site.linear is not None
            seen_by_t = site.linear.only(*(slot.parameter for slot in chosen))
            transformed = apply_operator(operator, gradients[0], seen_by_t)
            pieces.append((chosen, [transformed, *gradients[1:]]))
        for slots, incoming in pieces:
            outgoing = _call(site.node, incoming)
            for slot in slots:
                pulled = outgoing[slot.index]
                if pulled is not None:
                    shares.append(_share(slot, pulled))
                    reached.add(slot.parameter)
    return _through_views(shares, {name: parameters[name] for name in sorted(reached)})


def _chosen(site: GraphSite, where: Where) -> list[Slot]:
    """The slots of a site on which T acts."""
    if site.linear is None:
        return []
    return [
        slot
        for slot in site.slots
        if slot.role is not None and where(site.linear.only(slot.parameter))
    ]


def _call(node: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """A node's own backward: gradients of its inputs from those of its outputs."""
    with torch.no_grad():
        result = (node.apply if isinstance(node, BackwardCFunction) else node)(*gradients)
    return result if isinstance(result, tuple) else (result,)


def _share(slot: Slot, pulled: Tensor) -> tuple[GradientEdge, Tensor]:
    """Where an op's share of a virtual gradient arrives, a parameter or a view of one, and it."""
    node, output = slot.chain[0]
    metadata = node._input_metadata[output]
    # The engine would do both: undo broadcasting, and cast where the op mixed dtypes.
    pulled = pulled.sum_to_size(tuple(metadata.shape)).to(metadata.dtype)
    return GradientEdge(node, output), pulled


def _through_views(
    shares: list[tuple[GradientEdge, Tensor]], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Pull back through the transparent nodes between ops and parameters, and sum.

    In one pass, as a gradient goes: hooks on a parameter, or on a view of it, alter the sum, once.
    """
    if not shares:
        return {}
    edges, pulled = zip(*shares, strict=True)
    virtual = torch.autograd.grad(
        edges, list(parameters.values()), grad_outputs=pulled, retain_graph=True
    )
    return dict(zip(parameters, virtual, strict=True))
