"""Many tensors for one kernel of a GPU: their addresses, in memory that it reads them from.

Parameters stay where they are, gradients are new in every step. So a step writes down where all its
tensors lie, on the host, and sends that to the GPU in one go. What kernels go by beside it (sizes,
and which program has which part) hangs on how the tensors are laid out, and is kept for the next
step: shapes, strides, dtypes, devices and classes of all of them are compared each time, by C++
where :mod:`virtualgrad.native` was built.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.kernels import DTYPES, are_dense
from virtualgrad.operators.launches import ALIGNED, Launch

NUMBERS = 4096  # of a program
WARPS = 4
MOST_KEPT = 16
"""Layouts for one kernel: a step of one kind has one."""

Lists = Sequence[Sequence[Tensor]]


class Walk(NamedTuple):
    """How a kernel walks over tensors of some layout, wherever they lie.

    Attributes:
        sizes: how many numbers each has.
        parts: of each program, which tensor it has a part of, and which.
        like: an empty tensor of their dtype.
        is_aligned: whether all addresses are multiples of 16, so that a thread may read as much.
        launch: of the kernel, a program for each part.
    """

    sizes: Tensor
    parts: Tensor
    like: Tensor
    is_aligned: bool
    launch: Launch


class Table(NamedTuple):
    """Lists of tensors as a kernel reads them (:mod:`.guarded_kernel`).

    Attributes:
        begin: where their addresses begin, among those of the step.
        length: of a list.
        walk: over them.
    """

    begin: int
    length: int
    walk: Walk

    def launch(self, addresses: Tensor, more: tuple[Tensor, ...], others: tuple[Any, ...]) -> None:
        """Launch the kernel; tensors and numbers that only this one gets come behind the rest.

        Args:
            addresses: those of the step.
            more: further tensors.
            others: further numbers and, behind them, bools for which it is compiled.
        """
        walk = self.walk
        options = (*(each for each in others if isinstance(each, bool)), walk.is_aligned)
        tensors = (addresses, walk.sizes, walk.parts, walk.like, *more)
        walk.launch(tensors, (self.begin, *others, NUMBERS, walk.is_aligned), options, ())


class Addresses:
    """The addresses of one step's tensors.

    Args:
        device: theirs.

    Attributes:
        sent: the addresses on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, dict[Hashable, Walk | None]] = {}
        self._staged = torch.zeros(0, dtype=torch.int64)
        self._length = 0
        self._have_room_for(256)

    def _have_room_for(self, length: int) -> None:
        is_gpu = self._device.type == "cuda"
        staged = torch.zeros(length, dtype=torch.int64, pin_memory=is_gpu)
        staged[: self._length] = self._staged[: self._length]
        self._staged = staged
        self._as_floats = staged.view(torch.float64)
        self.sent = torch.zeros(length, dtype=torch.int64, device=self._device)

    def begin(self) -> None:
        """Begin a step: the GPU has taken what was sent for the one before."""
        self._length = 0

    def add(self, kernel: Any, lists: Lists, numbers: Sequence[float] = ()) -> Table | None:
        """Take in lists of equal lengths for a kernel; None if it does not take them.

        It takes plain tensors of one dtype on the device, which lie in memory without gaps, and all
        tensors of one place in the same order.

        Args:
            kernel: of Triton.
            lists: the tensors.
            numbers: that it reads behind the addresses, in float64.
        """
        tensors = [tensor for some in lists for tensor in some]
        begin, middle = self._length, self._length + len(tensors)
        end = middle + len(numbers)
        if end > self._staged.numel():
            self._have_room_for(2 * end)
        layout = _write(tensors, self._staged, begin)
        if layout is None:
            return None
        known = self._known.setdefault(kernel, {})
        key = (len(lists), layout)
        if key not in known:
            while len(known) >= MOST_KEPT:
                del known[next(iter(known))]  # what came first
            known[key] = _walk(kernel, lists, self._device)
        walk = known[key]
        if walk is None:
            return None
        if numbers:
            self._as_floats[middle:end] = torch.tensor(numbers, dtype=torch.float64)
        self._length = end
        return Table(begin, len(lists[0]), walk)

    def send(self) -> None:
        """Send all of it to the device; the host does not wait."""
        some = slice(self._length)
        self.sent[some].copy_(self._staged[some], non_blocking=True)


def _write(tensors: list[Tensor], into: Tensor, begin: int) -> Hashable | None:
    """Write addresses, and return how the tensors are laid out; None if some is not plain."""
    library = built()
    if library is not None:
        layout: bytes | None = library.write_addresses(tensors, into, begin)
        return layout
    if not set(map(type, tensors)).issubset(PLAIN):
        return None
    addresses = [tensor.data_ptr() for tensor in tensors]
    into[begin : begin + len(tensors)] = torch.tensor(addresses)
    is_aligned = tuple([address % ALIGNED for address in addresses])
    kinds = [(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]
    return (*kinds, is_aligned)


def _walk(kernel: Any, lists: Lists, device: torch.device) -> Walk | None:
    """The walk over tensors of this layout; None if the kernel does not take them."""
    first = lists[0]
    like = next((tensor for tensor in first if tensor.numel()), None)
    if like is None or like.dtype not in DTYPES or like.device != device:
        return None
    if not all(_are_side_by_side(together, like) for together in zip(*lists, strict=True)):
        return None
    sizes = torch.tensor([tensor.numel() for tensor in first])
    blocks = sizes.add(NUMBERS - 1).div(NUMBERS, rounding_mode="floor")
    tensors = torch.repeat_interleave(torch.arange(len(first)), blocks)
    before = (blocks.cumsum(0) - blocks)[tensors]
    parts = torch.stack([tensors, torch.arange(len(tensors)) - before], dim=1).to(torch.int32)
    is_aligned = all(tensor.data_ptr() % ALIGNED == 0 for some in lists for tensor in some)
    launch = Launch(kernel, (len(parts), 1, 1), like, WARPS)
    empty = torch.empty(0, dtype=like.dtype, device=device)
    return Walk(sizes.to(device), parts.to(device), empty, is_aligned, launch)


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
