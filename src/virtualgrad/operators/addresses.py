"""Many tensors for one kernel of a GPU: their addresses, in memory that it reads them from.

Parameters stay where they are, gradients are new in every step. So a step writes down where all its
tensors lie, on the host, and sends that to the GPU in one go. What kernels go by beside it (sizes,
and which program has which part) hangs on how the tensors are laid out, and is kept for the next
step: shapes, strides, dtypes and devices of all of them are compared each time, by C++ where
:mod:`virtualgrad.native` was built.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.launches import ALIGNED
from virtualgrad.operators.walks import Lists, Table, walk_over

FEW = 1024
"""Programs that may read a host's memory, each a few addresses, which takes the GPU as many 10 ns:
a copy would take the host of a small network longer."""
MOST_KEPT = 64
"""Layouts of steps: those of one kind have one."""


class Request(NamedTuple):
    """Lists of tensors for a kernel, whose addresses are to be sent.

    Attributes:
        kernel: of Triton.
        lists: how many there are.
        length: of each.
    """

    kernel: Any
    lists: int
    length: int


class Plan(NamedTuple):
    """What kernels go by in steps whose tensors are laid out alike.

    Attributes:
        tables: of what was asked for, in this order; None where its kernel does not take it.
        is_small: whether so few programs read addresses that they may fetch them from the host.
    """

    tables: Sequence[Table | None]
    is_small: bool

    @classmethod
    def of(cls, tables: Sequence[Table | None]) -> Plan:
        """That of these tables."""
        programs = sum(len(table.walk.parts) for table in tables if table is not None)
        return cls(tables, programs <= FEW)


class Addresses:
    """The addresses of one step's tensors.

    Args:
        device: theirs.

    Attributes:
        staged, sent: room for them on the host and on the device.
        given: the one of the two from which kernels read.
        tables: of what was asked for, in this order; None where its kernel does not take it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, Plan] = {}
        self._have_room_for(256)
        self.forget()

    def _have_room_for(self, length: int) -> None:
        self.staged = on_host(length, torch.int64, self._device)
        self.given = self.staged
        self.sent = torch.zeros(length, dtype=torch.int64, device=self._device)
        self._both = self.sent[:0], self.staged[:0]

    def forget(self) -> None:
        """Forget what was asked for, and the tensors."""
        self._asked: list[Request] = []
        self._all: list[Tensor | float] = []
        self.tables: Sequence[Table | None] = ()

    def ask(self, kernel: Any, lists: Lists, numbers: Sequence[float] = ()) -> int:
        """Have lists of equal lengths sent for a kernel; the place of their table.

        It takes plain tensors of one dtype on the device, which lie in memory without gaps, and all
        tensors of one place in the same order.

        Args:
            kernel: of Triton.
            lists: the tensors.
            numbers: that it reads behind the addresses, in float64.
        """
        for some in lists:
            self._all += some
        self._all += numbers
        self._asked.append(Request(kernel, len(lists), len(lists[0])))
        return len(self._asked) - 1

    def send(self) -> bool:
        """Send all of it to the device; False if there are tensors that are not plain ones.

        The host does not wait.
        """
        length = len(self._all)
        if length > self.staged.numel():
            self._have_room_for(2 * length)
        layout = _write(self._all, self.staged)
        if layout is None:
            return False
        key = (layout, *[(id(kernel), lists, length) for kernel, lists, length in self._asked])
        plan = self._known.pop(key, None)
        if plan is None:
            while len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]  # what was not in use for longest
            plan = Plan.of(list(self._tables()))
        self._known[key] = plan
        self.tables = plan.tables
        if plan.is_small:
            self.given = self.staged
            return True
        self.given = self.sent
        to, staged = self._both
        if len(to) != length:
            to, staged = self._both = self.sent[:length], self.staged[:length]
        to.copy_(staged, non_blocking=True)
        return True

    def _tables(self) -> Iterator[Table | None]:
        place = 0
        for kernel, lists, length in self._asked:
            begin, some = place, []
            for _ in range(lists):
                some.append(self._all[place : place + length])
                place += length
            while place < len(self._all) and isinstance(self._all[place], float):
                place += 1
            walk = walk_over(kernel, cast("Lists", some), self._device)
            yield None if walk is None else Table(begin, length, walk)


def on_host(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in memory of the host that a device can read and write."""
    pinned = device.type == "cuda"
    return torch.zeros(length, dtype=dtype, device="cpu", pin_memory=pinned)


def _write(everything: Sequence[Tensor | float], into: Tensor) -> Hashable | None:
    """Write addresses and numbers, and return how the tensors are laid out; None if some is odd."""
    library = built()
    if library is not None:
        layout: bytes | None = library.write_addresses(everything, into)
        return layout
    kinds: list[Hashable] = []
    values = []
    for each in everything:
        if isinstance(each, float):
            kinds.append(None)
            values.append(struct.unpack("q", struct.pack("d", each))[0])
        elif _is_its_memory(each):
            address = each.data_ptr()
            placed = (each.dtype, each.get_device(), address % ALIGNED)
            kinds.append((each.shape, each.stride(), *placed))
            values.append(address)
        else:
            return None
    into[: len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu")
    return tuple(kinds)


def _is_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor is what lies in its memory, and no more."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided:
        return False
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
