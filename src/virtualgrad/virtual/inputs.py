"""Encapsulation 1, the inputs of a model: how many samples there are, in whatever they come.

Folded rows (samples times positions in one axis) can only be told apart by that number. So it is
looked for in tuples and dicts, and in what libraries put around them: Hugging Face's BatchEncoding
is a mapping but no dict, batches of one's own are dataclasses or plain objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

DEPTH = 3  # of objects within objects: they may hold each other in a circle
OPTIONS = (str, bytes, bool, int, float, complex, type, type(None))
"""What says how to run a batch, and is none."""


def batch_size(arguments: Any, batch_dim: int) -> int | None:
    """Number of samples: the size of the first input tensor along ``batch_dim``.

    A size of one counts only if no input has another: it may be a value for the whole batch.
    Objects of no known kind may hold anything, and are asked if nothing else has a size.
    """
    size = _batch_size(tensors_of(arguments), batch_dim)
    return _batch_size(tensors_of(arguments, True), batch_dim) if size is None else size


def _batch_size(inputs: list[Tensor | PackedSequence], batch_dim: int) -> int | None:
    packed = [each for each in inputs if isinstance(each, PackedSequence)]
    if packed:
        return int(packed[0].batch_sizes[0])
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    sizes = [tensor.shape[batch_dim] for tensor in tensors if tensor.dim() > batch_dim]
    several = [size for size in sizes if size != 1]
    if several:
        return several[0]
    return sizes[0] if sizes else None


def tensors_of(
    value: Any, in_any_object: bool = False, depth: int = DEPTH
) -> list[Tensor | PackedSequence]:
    """All tensors and packed sequences in (nested) arguments, in order.

    Args:
        value: the arguments.
        in_any_object: whether also to look at the attributes of objects of no known kind.
        depth: how many objects that are neither lists, tuples nor dicts are opened on the way.
    """
    if isinstance(value, Tensor | PackedSequence):
        return [value]
    if isinstance(value, dict):
        members: Iterable[Any] = list(value.values())
    elif isinstance(value, list | tuple):
        members = value
    elif depth == 0 or isinstance(value, (*OPTIONS, nn.Module)):
        return []
    else:
        depth, members = depth - 1, _members(value, in_any_object)
    return [found for each in members for found in tensors_of(each, in_any_object, depth)]


def _members(value: Any, in_any_object: bool) -> list[Any]:
    if isinstance(value, Mapping):
        return [value[key] for key in value]
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields is not None:
        return [getattr(value, name, None) for name in fields]
    return list(getattr(value, "__dict__", {}).values()) if in_any_object else []


def strange_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The classes of the arguments that may well be a batch, though no tensor was found there."""
    given = [*args, *kwargs.values()]
    return ", ".join([type(each).__name__ for each in given if not isinstance(each, OPTIONS)])
