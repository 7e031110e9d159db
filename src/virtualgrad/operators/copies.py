"""Forgetting on a GPU what compiled passes have brought: a copy only where they have.

After a commit a candidate is r again, and there is nothing to forget. The host knows that, but a
captured ``zero_grad`` asks no host: it would copy all of r in every step. So the GPU looks at what
was counted.
"""

from __future__ import annotations

from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.launches import Launch

NUMBERS = 4096
PROGRAMS_EACH = 8  # of a multiprocessor
WARPS = 8


class CopyIfCounted:
    """Copies r into its candidate if passes have been counted since the last commit.

    Args:
        target: the candidate; it lies in memory as r does, without gaps.
        source: r.
        counts: what was counted (:mod:`.compiled`).
    """

    def __init__(self, target: Tensor, source: Tensor, counts: Tensor) -> None:
        from virtualgrad.operators.copy_kernel import copy_if_counted  # noqa: PLC0415 - Triton

        n = target.numel()
        most = PROGRAMS_EACH * kernels.processors_of(target.device)
        share = -(-n // (most * NUMBERS)) * NUMBERS
        self._tensors = (target, source, counts)
        self._others = (n, share, NUMBERS)
        self._launch = Launch(copy_if_counted, (-(-n // share), 1, 1), target, WARPS)
        self()  # compiles it: within the capture of a graph it would be too late

    def __call__(self) -> None:
        """Copy, or not."""
        self._launch(self._tensors, self._others)


def prepare_copy(target: Tensor, source: Tensor, counts: Tensor) -> CopyIfCounted | None:
    """The copy as a kernel; None where plain torch is to be used."""
    if type(target) is not Tensor or type(source) is not Tensor:
        return None  # a shard, say, has no memory of its own
    axes = [axis for axis in range(target.dim()) if target.shape[axis] > 1]
    if target.stride() != source.stride() or not kernels.are_dense(target, axes):
        return None
    if not kernels.may_launch(target.device) or not kernels.is_usable(target.device):
        return None
    return CopyIfCounted(target, source, counts)
