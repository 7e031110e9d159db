"""How a kernel of a GPU walks over many tensors in one launch, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.kernels import DTYPES, are_dense
from virtualgrad.operators.launches import ALIGNED, Launch

NUMBERS = 4096  # of a program
WARPS = 4

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

    def launch(
        self,
        addresses: Tensor,
        more: tuple[Tensor, ...],
        others: tuple[float, ...],
        options: tuple[bool, ...] = (),
    ) -> None:
        """Launch the kernel; tensors and numbers that only this one gets come behind the rest.

        Args:
            addresses: those of the step.
            more: further tensors.
            others: further numbers.
            options: for which it is compiled.
        """
        walk = self.walk
        tensors = (addresses, walk.sizes, walk.parts, walk.like, *more)
        numbers = (self.begin, *others, *options, NUMBERS, walk.is_aligned)
        walk.launch(tensors, numbers, (options, walk.is_aligned), ())

    def in_cpp(self, options: tuple[bool, ...]) -> tuple[Any, ...] | None:
        """What C++ goes by to do such a launch again; None where Triton is to launch."""
        walk = self.walk
        kernel = walk.launch.in_cpp((options, walk.is_aligned))
        return None if kernel is None else (kernel, walk.sizes, walk.parts, walk.like, self.begin)


def walk_over(kernel: Any, lists: Lists, device: torch.device) -> Walk | None:
    """The walk over tensors of this layout; None if the kernel does not take them."""
    first = lists[0]
    like = next((tensor for tensor in first if tensor.numel()), None)
    if like is None or like.dtype not in DTYPES or like.device != device:
        return None
    if not all(_are_side_by_side(together, like) for together in zip(*lists, strict=True)):
        return None
    sizes = torch.tensor([tensor.numel() for tensor in first], device="cpu")
    blocks = sizes.add(NUMBERS - 1).div(NUMBERS, rounding_mode="floor")
    tensors = torch.repeat_interleave(torch.arange(len(first), device="cpu"), blocks)
    places = torch.arange(len(tensors), device="cpu") - (blocks.cumsum(0) - blocks)[tensors]
    parts = torch.stack([tensors, places], dim=1).to(torch.int32)
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
