"""Many tensors for one kernel of a GPU: their addresses, in memory that it reads them from.

Parameters stay where they are, gradients are new in every step. But an allocator that is asked for
the same gives the same, so what was made for some addresses is kept, for the next step that has
them. Everything that the kernel goes by is compared first: addresses, shapes, strides, dtypes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.kernels import DTYPES, are_dense
from virtualgrad.operators.launches import ALIGNED, Launch

NUMBERS = 4096  # of a program
WARPS = 4
MOST_KEPT = 16
"""Sets of addresses: a step of one shape has one or two."""

Lists = Sequence[Sequence[Tensor]]


class Walk(NamedTuple):
    """How a kernel walks over tensors of some sizes, wherever they lie.

    Attributes:
        sizes: how many numbers each has.
        parts: of each program, which tensor it has a part of, and which.
        like: an empty tensor of their dtype.
        launch: of the kernel, a program for each part.
    """

    sizes: Tensor
    parts: Tensor
    like: Tensor
    launch: Launch


class Table(NamedTuple):
    """Lists of tensors as a kernel reads them (:mod:`.guarded_kernel`).

    Attributes:
        addresses: theirs, one list behind the other.
        length: of a list.
        is_aligned: whether all addresses are multiples of 16, so that a thread may read as much.
        weights: numbers that come with the tensors, if any.
        walk: over them.
    """

    addresses: Tensor
    length: int
    is_aligned: bool
    weights: Tensor | None
    walk: Walk

    def launch(self, more: tuple[Tensor, ...], others: tuple[Any, ...], kind: Hashable) -> None:
        """Launch the kernel; the tensors that it gets beside its own come behind them."""
        walk = self.walk
        own = (self.addresses, walk.sizes, walk.parts, walk.like)
        meta = (NUMBERS, self.is_aligned)
        walk.launch((*own, *more), (*others, *meta), (kind, self.is_aligned), ())


class Addresses:
    """Tables for one kernel.

    Args:
        kernel: of Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._tables: dict[Hashable, Table | None] = {}
        self._walks: dict[Hashable, Walk] = {}

    def table(self, lists: Lists, weights: Sequence[float] = ()) -> Table | None:
        """The table of some lists of equal lengths; None if the kernel does not take them.

        It takes plain tensors of one device and dtype, which lie in memory without gaps, and all
        tensors of one place in the same order.
        """
        for tensors in lists:
            if not set(map(type, tensors)).issubset(PLAIN):
                return None
        facts = [[(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in some] for some in lists]
        stream = _stream_on(lists[0][0])
        key = (stream, *map(tuple, facts), tuple(weights))
        if key not in self._tables:
            _make_room(self._tables)
            self._tables[key] = self._made(lists, weights, stream)
        return self._tables[key]

    def _made(self, lists: Lists, weights: Sequence[float], stream: int) -> Table | None:
        first = lists[0]
        like = next((tensor for tensor in first if tensor.numel()), None)
        if like is None or like.dtype not in DTYPES:
            return None
        if not all(_are_side_by_side(together, like) for together in zip(*lists, strict=True)):
            return None
        sizes = tuple([tensor.numel() for tensor in first])
        known = (stream, sizes, like.dtype, like.device, len(lists))
        if known not in self._walks:
            _make_room(self._walks)
            self._walks[known] = _walk(self._kernel, sizes, like)
        addresses = [tensor.data_ptr() for tensors in lists for tensor in tensors]
        sent = _sent(torch.tensor(addresses), like.device)
        numbers = torch.tensor(weights, dtype=torch.float32) if weights else None
        weighted = None if numbers is None else _sent(numbers, like.device)
        is_aligned = all(address % ALIGNED == 0 for address in addresses)
        return Table(sent, len(first), is_aligned, weighted, self._walks[known])


def _walk(kernel: Any, sizes: tuple[int, ...], like: Tensor) -> Walk:
    numbers = torch.tensor(sizes)
    blocks = numbers.add(NUMBERS - 1).div(NUMBERS, rounding_mode="floor")
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    before = (blocks.cumsum(0) - blocks)[tensors]
    parts = torch.stack([tensors, torch.arange(len(tensors)) - before], dim=1).to(torch.int32)
    launch = Launch(kernel, (len(parts), 1, 1), like, WARPS)
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return Walk(_sent(numbers, like.device), _sent(parts, like.device), empty, launch)


def _make_room(kept: dict[Hashable, Any]) -> None:
    """Let go of what was kept first, if there is too much."""
    while len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]


def _are_side_by_side(tensors: Sequence[Tensor], like: Tensor) -> bool:
    """Whether the tensors of one place are as kernels want them."""
    one = tensors[0]
    axes = [axis for axis in range(one.dim()) if one.shape[axis] > 1]
    strides = [one.stride(axis) for axis in axes]
    return all(
        tensor.shape == one.shape
        and tensor.dtype == like.dtype
        and tensor.device == like.device
        and tensor.data_ptr() % tensor.element_size() == 0
        and [tensor.stride(axis) for axis in axes] == strides
        and (tensor.numel() == 0 or are_dense(tensor, axes))
        for tensor in tensors
    )


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers on their way to a device; the host does not wait."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _stream_on(tensor: Tensor) -> int:
    """The stream on which a table is read: let go, its memory is taken again there alone."""
    if not tensor.is_cuda:
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
