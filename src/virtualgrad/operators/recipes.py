"""What an eager pass has launched at a site, written down so that C++ launches it once more.

A pass asks for memory and launches kernels into it; the next one at the same site, with a g of the
same kind, does the same with other addresses and other numbers. So nothing of what kernels do has
to be known here: which tensors were given tells which memory was new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.launches import AddedUp, Launched
from virtualgrad.operators.native_launches import STREAM_ON

Room = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of memory that a pass asks for."""

Step = Launched | AddedUp
"""Of a pass."""


class Rooms:
    """The memory of a pass: that of given tensors, and what it has asked for.

    Args:
        given: the tensors that are given.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.asked_for: list[Room | None] = []
        self._given = list(given)
        self._numbers = {_begin(tensor): number for number, tensor in enumerate(given)}

    def pointer(self, tensor: Tensor) -> tuple[int, int]:
        """The number of a tensor's room, and how many bytes into it the tensor begins.

        A given tensor is its own room, wherever it begins. One that was not seen yet is new.
        """
        for number, given in enumerate(self._given):
            if tensor is given:
                return number, 0
        begin = _begin(tensor)
        if begin not in self._numbers:
            self._numbers[begin] = len(self._numbers)
            self.asked_for.append(_room_of(tensor))
        return self._numbers[begin], int(tensor.storage_offset()) * tensor.element_size()

    def add(self, tensor: Tensor) -> int:
        """The number of a room that torch makes itself."""
        number = self._numbers[_begin(tensor)] = len(self._numbers)
        self.asked_for.append(None)
        return number

    def view(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Room, sizes, strides and offset of a tensor; None if no kernel has written to it."""
        if _begin(tensor) not in self._numbers:
            return None
        number, offset = self.pointer(tensor)
        shape, strides = tuple(tensor.shape), tensor.stride()
        return number, shape, strides, offset // tensor.element_size()


def recipe_of(
    library: Any, steps: Sequence[Step], given: Sequence[Tensor], results: Sequence[Tensor | None]
) -> Any:
    """A ``Recipe`` of C++; None where more was done than its steps.

    Args:
        library: that was built.
        steps: of a pass.
        given: the tensors that they were made with, each in a memory of its own.
        results: what was made.
    """
    if len({_begin(tensor) for tensor in given}) < len(given):
        return None
    rooms, made = Rooms(given), []
    for step in steps:
        told = _launch(rooms, step) if isinstance(step, Launched) else _sum(rooms, step)
        if told is None:
            return None
        made.append(told)
    views = [None if result is None else rooms.view(result) for result in results]
    if any(
        view is None and result is not None for view, result in zip(views, results, strict=True)
    ):
        return None  # torch has made it, by what nobody has written down
    return library.Recipe(rooms.asked_for, made, views, STREAM_ON)


def _launch(rooms: Rooms, step: Launched) -> tuple[Any, ...] | None:
    """A launch as C++ takes it; None if the kernel is not launched by C++."""
    if step.kernel is None:
        return None
    pointers = [None if tensor is None else rooms.pointer(tensor) for tensor in step.tensors]
    return step.kernel, pointers, step.others


def _sum(rooms: Rooms, step: AddedUp) -> tuple[Any, ...] | None:
    """A sum as C++ takes it; None of what no kernel has left."""
    view = rooms.view(step.parts)
    return None if view is None else (view, step.axis, rooms.add(step.total))


def _begin(tensor: Tensor) -> int:
    """Where the memory begins that a tensor lies in."""
    return tensor.untyped_storage().data_ptr()


def _room_of(tensor: Tensor) -> Room:
    """The memory that a new tensor lies in: the tensor itself, or all that it is a view of."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() == count and tensor.storage_offset() == 0:
        return tuple(tensor.shape), tensor.stride(), tensor.dtype
    return (count,), (1,), tensor.dtype
