"""Sums over all ranks (processes that share a batch) that are on their way while the host goes on.

What a reduction of small tensors takes is the wait for the other ranks. So all of them travel in
one flat buffer (one per dtype; models of several are rare), with some numbers in front,

    flat = (numbers | first tensor | second tensor | ...)

and are waited for as late as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Buffer:
    """What travels together.

    Attributes:
        flat: the numbers, those of this rank until they are waited for.
        sizes: where to cut it.
        places: which of the tensors it holds, in order.
        work: what to wait for.
    """

    flat: Tensor
    sizes: list[int]
    places: list[int]
    work: Any


class Reduction:
    """Begin to add up some numbers and tensors over all ranks, without waiting for it.

    Args:
        ahead: the numbers; the dtypes of the tensors must hold their sums.
        tensors: real ones.
        group: the process group; all of its ranks must come here, with tensors of the same shapes.
        device: where the tensors lie.
    """

    def __init__(
        self, ahead: Sequence[int], tensors: Sequence[Tensor], group: Any, device: torch.device
    ) -> None:
        self._buffers: list[Buffer] = []
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str) or [torch.float32]:
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            head = torch.tensor(ahead, dtype=dtype, device=device)
            flat = torch.cat([head, *(tensors[place].flatten() for place in places)])
            sizes = [len(ahead), *(tensors[place].numel() for place in places)]
            work = dist.all_reduce(flat, group=group, async_op=True)
            self._buffers.append(Buffer(flat, sizes, places, work))
            ahead = ()  # they travel once

    def wait(self) -> tuple[list[float], list[Tensor]]:
        """The sums, of the numbers and of the tensors (flat); the host waits for them."""
        numbers: list[float] = []
        summed: dict[int, Tensor] = {}
        for buffer in self._buffers:
            buffer.work.wait()
            head, *rest = buffer.flat.split(buffer.sizes)
            numbers += head.tolist()
            summed |= dict(zip(buffer.places, rest, strict=True))
        return numbers, [summed[place] for place in range(len(summed))]
