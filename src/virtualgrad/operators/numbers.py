"""A number for all tensors of a list: what torch's foreach functions on a CPU are slow at.

They go from tensor to tensor there, and make a tensor of the number for each of them anew, which
takes longer than to add it or to multiply by it. So it is made once, as torch.optim does for the
counts of Adam, and kept; in the tensors' own dtype, so that not a bit changes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

KEPT = 64  # numbers; an optimizer has three for each of its groups


def dtype_on_cpu(tensor: Tensor) -> torch.dtype | None:
    """The dtype of a plain tensor on a CPU; None for all others (shards, those on a GPU)."""
    return tensor.dtype if type(tensor) is Tensor and tensor.is_cpu else None


def multiply_all(tensors: list[Tensor], number: float | Tensor, on_cpu: torch.dtype | None) -> None:
    """Multiply tensors in place, all of which have this :func:`dtype_on_cpu`."""
    torch._foreach_mul_(tensors, _made_once(number, on_cpu))


def add_to_all(tensors: list[Tensor], number: float | Tensor, on_cpu: torch.dtype | None) -> None:
    """Add a number to tensors in place, all of which have this :func:`dtype_on_cpu`."""
    made = _made_once(number, on_cpu)
    if isinstance(made, Tensor) and made is not number:
        # alpha: without it torch would take the tensor for a number again.
        torch._foreach_add_(tensors, made, alpha=1)
    else:
        torch._foreach_add_(tensors, number)


def _made_once(number: float | Tensor, on_cpu: torch.dtype | None) -> float | Tensor:
    """The number as a tensor on the CPU, or as it is.

    Compilers know what to do with numbers. And what is made under a mode of torch (of fake tensors,
    say) may be no tensor for others.
    """
    if on_cpu is None or isinstance(number, Tensor) or torch.compiler.is_compiling():
        return number
    return number if torch._C._len_torch_dispatch_stack() else _as_tensor(number, on_cpu)


@lru_cache(KEPT)
def _as_tensor(number: float, dtype: torch.dtype) -> Tensor:
    """The number as a tensor, which nobody writes to."""
    return torch.full((), number, dtype=dtype, device="cpu")
