"""What views, copies and casts have made of a parameter, read off their autograd nodes.

Encapsulation 2 sees no tensors, only nodes. What a view has picked, or where a parameter was
expanded, is found by making the same views again, of the numbers of the parameter's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from virtualgrad.sites.nodes import Shape

Node = Any
"""An autograd node; torch has no public type with all that we read off it."""

Chain = Sequence[tuple[Node, int]]
"""Nodes and their outputs from an op to a parameter, whose own node comes last."""


def shape_of(node: Node, output: int) -> Shape:
    """Shape of one output of a node."""
    metadata = node._input_metadata  # what comes into its backward: gradients of its outputs
    return tuple(metadata[output].shape) if output < len(metadata) else ()


def offset(chain: Chain) -> str:
    """``"@n"`` for a slice of a parameter that begins n numbers into it: slices are told apart.

    An expert of a stack keeps its r while others get no rows. Read as far as the views between the
    parameter and the op are known.
    """
    *views, (leaf, _) = chain
    parameter: Tensor = leaf.variable
    if prod(shape_of(*chain[0])) >= parameter.numel():
        return ""
    part = parameter.detach()
    for node, output in reversed(views):
        view = VIEWS.get(node.name())
        if view is None:
            break
        part = view(part, node, output)
    return f"@{part.storage_offset() - parameter.storage_offset()}"


def unexpanded(chain: Chain, shape: Shape) -> Shape:
    """The shape in which an op takes a parameter, with size 1 for axes along which it is the same.

    Args:
        chain: the way to the parameter; where a node in it is not known, nothing is found.
        shape: of what the op takes, perhaps with its axes split.
    """
    *views, (leaf, _) = chain
    if not any(node.name() == "ExpandBackward0" for node, _ in views):
        return shape
    numbers = torch.arange(leaf.variable.numel()).view(leaf.variable.shape)
    for node, output in reversed(views):
        view = VIEWS.get(node.name(), COPIES.get(node.name()))
        if view is None:
            return shape
        numbers = view(numbers, node, output)
    numbers = numbers.reshape(shape)
    return tuple(1 if _is_same_along(numbers, axis) else size for axis, size in enumerate(shape))


def _is_same_along(numbers: Tensor, axis: int) -> bool:
    return numbers.shape[axis] > 0 and bool((numbers == numbers.narrow(axis, 0, 1)).all())


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number  # saved as an unsigned number


def _select(part: Tensor, node: Node, output: int) -> Tensor:
    return part.select(_signed(node._saved_dim), _signed(node._saved_index))


def _slice(part: Tensor, node: Node, output: int) -> Tensor:
    start, end = _signed(node._saved_start), _signed(node._saved_end)
    before = (slice(None),) * (_signed(node._saved_dim) % part.dim())
    return part[(*before, slice(start, end, node._saved_step))]


def _unbind(part: Tensor, node: Node, output: int) -> Tensor:
    return part.select(_signed(node._saved_dim), output)


def _split(part: Tensor, node: Node, output: int) -> Tensor:
    sizes = getattr(node, "_saved_split_size", None)
    sizes = node._saved_split_sizes if sizes is None else sizes
    parts: tuple[Tensor, ...] = part.split(sizes, _signed(node._saved_dim))
    return parts[output]


def _transpose(part: Tensor, node: Node, output: int) -> Tensor:
    return part.transpose(_signed(node._saved_dim0), _signed(node._saved_dim1))


def _permute(part: Tensor, node: Node, output: int) -> Tensor:
    return part.permute([_signed(dim) for dim in node._saved_dims])


def _reshape(part: Tensor, node: Node, output: int) -> Tensor:
    return part.reshape(shape_of(node, output))


def _expand(part: Tensor, node: Node, output: int) -> Tensor:
    return part.expand(shape_of(node, output))


def _copy(part: Tensor, node: Node, output: int) -> Tensor:
    return part


VIEWS: dict[str, Callable[[Tensor, Node, int], Tensor]] = {
    "SelectBackward0": _select,
    "SliceBackward0": _slice,
    "UnbindBackward0": _unbind,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "TBackward0": lambda part, node, output: part.t(),
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "ViewBackward0": _reshape,
    "UnsqueezeBackward0": _reshape,
    "SqueezeBackward0": _reshape,
    "SqueezeBackward1": _reshape,
    "SqueezeBackward2": _reshape,
}
"""Node -> the view that it made: (what it was made of, node, which output) -> it."""

COPIES: dict[str, Callable[[Tensor, Node, int], Tensor]] = {
    "ExpandBackward0": _expand,
    "CloneBackward0": _copy,
    "ToCopyBackward0": _copy,
    "AliasBackward0": _copy,
    "UnsafeViewBackward0": _reshape,  # mostly of a copy
    "ReshapeAliasBackward0": _reshape,
}
"""The same for nodes behind which a number may stand several times, or in another place."""
