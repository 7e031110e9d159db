"""A copy that is made only where something was counted (written in Triton; imported when needed).

As in :mod:`.rms_kernel`, Triton reads the annotations.
"""

import triton
import triton.language as tl


@triton.jit
def copy_if_counted(  # noqa: PLR0917 - Triton has no keywords here
    target, source, counts, n, share, NUMBERS: tl.constexpr
):  # pragma: no cover - runs on a GPU, or in the interpreter's own process
    """Copy n numbers if the first of the counts is not zero; a program has ``share`` of them."""
    if tl.load(counts) != 0:
        first = tl.program_id(0).to(tl.int64) * share
        for start in range(0, share, NUMBERS):
            at = first + start + tl.arange(0, NUMBERS)
            inside = at < n
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
