"""Launches of Triton's kernels, made for speed: what Triton asks of the arguments is asked once.

A kernel is compiled for what its arguments are: the types of all, and of tensors and whole numbers
whether they are multiples of 16. So Triton looks at each of them at each launch, 8 of 17 us on the
host of an H200. Here sizes are those of a shape, and new tensors begin where the allocator puts
them. What may still differ is looked at, and the compiled kernel is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.native_launches import Relaunch, native_kernel, relaunch

ALIGNED = 16  # bytes
Tensors = tuple[Tensor | None, ...]


class OpLaunch(NamedTuple):
    """A launch by an op of compiled passes: grid, arguments, and how many warps a program has."""

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int


class Launched(NamedTuple):
    """A launch that was made: by which kernel of C++, if by one, and with which arguments."""

    kernel: Any
    tensors: Tensors
    others: tuple[Any, ...]


class AddedUp(NamedTuple):
    """A sum by torch of what kernels have left: of which tensor, along which axis, and the sum."""

    parts: Tensor
    axis: int
    total: Tensor


class _Record(threading.local):
    """What a thread has launched, where somebody wants to know of it."""

    steps: list[Launched | AddedUp] | None = None


_record = _Record()


@contextmanager
def recorded() -> Iterator[list[Launched | AddedUp]]:
    """Have what this thread launches by a :class:`Launch`, and adds up behind, written down."""
    before, _record.steps = _record.steps, []
    try:
        yield _record.steps
    finally:
        _record.steps = before


def added_up(parts: Tensor, axis: int) -> Tensor:
    """The sum of what kernels have left along an axis."""
    total = parts.sum(axis)
    if _record.steps is not None:
        _record.steps.append(AddedUp(parts, axis, total))
    return total


class Launch:
    """A kernel with its grid, on one device.

    Args:
        kernel: of Triton.
        grid: how many programs there are, along three axes.
        like: a tensor on the device.
        warps: of each program.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], like: Tensor, warps: int) -> None:
        self._kernel = kernel[grid]
        self._grid = grid
        self._device = like.get_device()
        self._warps = warps
        self._kept: dict[Hashable, Relaunch] = {}
        self._in_cpp: dict[Hashable, Any] = {}

    def __call__(
        self,
        tensors: Tensors,
        others: tuple[Any, ...],
        kind: Hashable = None,
        given: Tensors | None = None,
    ) -> None:
        """Launch it.

        Args:
            tensors: the first arguments; in all launches of a kind the same of them are None, and
                the others have the same dtypes.
            others: the rest; in all launches of a kind the same but for floats.
            kind: what tells launches apart for which kernels have to be compiled.
            given: the tensors that may begin anywhere, such as views; None: any of them. New ones
                begin where the allocator puts them, which is aligned.
        """
        addresses = 0
        for tensor in tensors if given is None else given:
            if tensor is not None:
                addresses |= tensor.data_ptr()
        is_aligned = addresses % ALIGNED == 0
        kept = self._kept.get(kind) if is_aligned else None
        if kept is not None and self._device == torch.cuda.current_device():
            kept(tensors, others)
        else:
            compiled = launch(self._kernel, self._device, (*tensors, *others), self._warps)
            if is_aligned and compiled is not None:
                self._keep(kind, compiled)
        if _record.steps is not None:
            kernel = self._in_cpp.get(kind) if is_aligned else None
            _record.steps.append(Launched(kernel, tensors, others))

    def in_cpp(self, kind: Hashable) -> Any:
        """The kernel of C++ for launches of a kind that there were; None if there is none."""
        return self._in_cpp.get(kind)

    def _keep(self, kind: Hashable, compiled: Any) -> None:
        """Have a compiled kernel for the next launch of its kind."""
        kernel = self._in_cpp[kind] = native_kernel(compiled, self._grid)
        self._kept[kind] = relaunch(compiled, self._grid, self._device, kernel)


def launch(kernel: Any, device: int, arguments: tuple[Any, ...], warps: int) -> Any:
    """Launch a kernel with its grid on a device, and return it compiled; below 0 is a CPU.

    Triton launches on the current device; the engine has made it g's, a bare call may not. (Its
    interpreter, which runs kernels on a CPU, compiles nothing, and returns None.)
    """
    # Fusion is Triton's default up to 3.9, which warns where it is left open.
    if device < 0 or device == torch.cuda.current_device():
        return kernel(*arguments, num_warps=warps, enable_fp_fusion=True)
    with torch.cuda.device(device):
        return kernel(*arguments, num_warps=warps, enable_fp_fusion=True)
