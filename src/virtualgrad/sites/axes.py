"""Which axes of sigma a parameter makes, by the op: one small function for each kind of op.

The other axes of sigma count samples and positions (:mod:`.site`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Arguments = Mapping[str, Any]
MASKS = (torch.bool, torch.uint8)
AxesOf = Callable[[int, str, Tensor, Arguments], set[int]]
"""(rank of sigma, name of the argument, the argument, all arguments) -> axes of sigma it makes."""


def broadcast(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """Axes along which an operand, aligned at the last axis, differs (size over 1, no expand)."""
    first = rank - operand.dim()
    sizes = zip(operand.shape, operand.stride(), strict=True)
    return {first + i for i, (size, stride) in enumerate(sizes) if size > 1 and stride != 0}


def every(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """All axes: sigma is made of the parameter alone."""
    return set(range(rank))


def last(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """The last axis: features."""
    return {rank - 1}


def rows_or_last(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """Features; of a parameter that is the input, the axes before them.

    A weight may be a vector: then sigma has no features, and a bias broadcasts.
    """
    if arguments["weight"].dim() == 1:
        if name == "weight":
            return set()
        return broadcast(rank, name, operand[..., 0] if name == "input" else operand, arguments)
    own = broadcast(rank, name, operand, arguments)
    return own - {rank - 1} if name == "input" else {rank - 1}


def channel(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """The channel axis of (N, C, ...)."""
    return {1} if operand.numel() > 1 and rank > 1 else set()


def convolution(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """The channel axis of (N, C, *space), or of (C, *space) without a batch."""
    space = arguments["weight"].dim() - 2
    return {rank - 1 - space}


def normalized(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """The trailing axes that layer and RMS norm scale element by element."""
    return set(range(rank - operand.dim(), rank))


def matmul(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """Rows of a left operand, columns of a right one, and its own batch axes."""
    names = _matmul_names(arguments)
    left, right = (arguments[key] for key in names)
    if operand.dim() == 1:
        return set()
    if name == names[1]:
        own, along, batch_rank = rank - 1, -1, rank - (2 if left.dim() > 1 else 1)
    else:
        own = batch_rank = rank - (2 if right.dim() > 1 else 1)
        along = -2
    is_expanded = operand.shape[along] > 1 and operand.stride(along) == 0
    axes = set() if is_expanded else {own}
    batch = operand[..., 0, 0] if operand.dim() > 2 else None  # a copy would have other strides
    return axes if batch is None else axes | broadcast(batch_rank, name, batch, arguments)


def _matmul_names(arguments: Arguments) -> tuple[str, str]:
    for names in (("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec"), ("input", "mat2")):
        if names[0] in arguments and names[1] in arguments:
            return names
    second = next(name for name in ("other", "vec", "vec2", "tensor") if name in arguments)
    return "input", second


def addmm(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """A matrix product with an addend that broadcasts."""
    rule = broadcast if name == "input" else matmul
    return rule(rank, name, operand, arguments)


def einsum(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """Axes whose letter stands in the operand's subscripts (where it is not expanded)."""
    inputs, arrow, output = arguments["equation"].replace(" ", "").partition("->")
    mine = inputs.split(",")[int(name.removeprefix("operands[").removesuffix("]"))]
    if not arrow:
        letters = sorted(set(inputs) - set(",."))
        once = "".join(letter for letter in letters if inputs.count(letter) == 1)
        output = "..." + once if "..." in inputs else once
    # An ellipsis stands for axes that are aligned at its end: write them as digits, last one "0".
    in_ellipsis = operand.dim() - len(mine.replace("...", ""))
    out_ellipsis = rank - len(output.replace("...", ""))
    mine = mine.replace("...", "".join(str(i) for i in reversed(range(in_ellipsis))))
    output = output.replace("...", "".join(str(i) for i in reversed(range(out_ellipsis))))
    own = broadcast(operand.dim(), name, operand, arguments)
    letters_of_own = {letter for axis, letter in enumerate(mine) if axis in own}
    return {axis for axis, letter in enumerate(output) if letter in letters_of_own}


def tensordot(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """The operand's axes that are not contracted: first those of a, then those of b."""
    contracted = arguments.get("dims", 2)
    count = contracted if isinstance(contracted, int) else len(contracted[0])
    kept = operand.dim() - count
    return set(range(kept)) if name == "a" else set(range(rank - kept, rank))


def concatenated(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """The operand's own axes along which it differs; the rest comes from its neighbours."""
    return broadcast(rank, name, operand, arguments)


def selected(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """All axes but the one that the index makes."""
    return set(range(rank)) - {int(arguments["dim"]) % rank}


def indexed(rank: int, name: str, operand: Tensor, arguments: Arguments) -> set[int]:
    """All axes but those that tensors among the index make; all of them for lists, say.

    Torch puts those axes where the tensors stand, or first if there is something between them.
    """
    index = arguments["index"]
    items = index if isinstance(index, tuple) else (index,)
    if not all([_is_read(item) for item in items]):
        return set(range(rank))
    left = operand.dim() - sum([_taken_by(item) for item in items])
    are_own: list[bool] = []  # of sigma's axes, with one for all that tensors make in a place
    for item in items:
        if item is Ellipsis:
            are_own += [True] * left
            left = 0
        elif isinstance(item, slice) or item is None:
            are_own.append(True)
        elif is_picking(item):
            are_own.append(False)
    return picked_axes_left_out(rank, [*are_own, *[True] * left])


def picked_axes_left_out(rank: int, are_own: Sequence[bool]) -> set[int]:
    """The operand's own axes among those of sigma, in which index tensors have made others.

    Args:
        rank: of sigma.
        are_own: for each axis of sigma whether it is the operand's; one place for each tensor of
            the index, however many axes they make.
    """
    places = [place for place, is_own in enumerate(are_own) if not is_own]
    adjacent = places[-1] - places[0] + 1 == len(places)
    first = places[0] if adjacent else 0
    made = rank - sum(are_own)
    return set(range(rank)) - set(range(first, first + made))


def is_picking(item: Any) -> bool:
    """Whether an item of an index is a tensor that picks; an integer without axes selects."""
    return isinstance(item, Tensor) and (item.dim() > 0 or item.dtype in MASKS)


def _is_read(item: Any) -> bool:
    is_number = isinstance(item, int) and not isinstance(item, bool)
    return is_number or item is None or isinstance(item, Tensor | slice | type(Ellipsis))


def _taken_by(item: Any) -> int:
    """How many axes of the operand an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in MASKS else 1
