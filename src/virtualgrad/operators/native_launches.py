"""Launches by :mod:`virtualgrad.native`, where it was built: without Triton's Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from virtualgrad.native import built

WARP = 32  # threads
KINDS = {"i32": "i32", "i64": "i64", "fp32": "fp32", "constexpr": ""}
"""Triton's name of what an argument is -> ours; pointers begin with a star."""

WANTS = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
"""What a kernel may want beside its arguments: then Triton launches it."""

STREAM_ON: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Device -> its current stream; None in a torch without CUDA, where nothing is launched."""

Relaunch = Callable[[tuple[Any, ...], tuple[Any, ...]], None]
"""(tensors, others) -> a launch with these arguments, the tensors first."""


def relaunch(
    compiled: Any, grid: tuple[int, int, int], device: int, kernel: Any = None
) -> Relaunch:
    """How to launch a compiled kernel again, on the same device; it must be the current one.

    By C++ if there is a kernel for it (:func:`native_kernel`).
    """
    run = compiled[grid]  # which keeps it alive
    if kernel is None:
        return lambda tensors, others: run(*tensors, *others)

    def launch(tensors: tuple[Any, ...], others: tuple[Any, ...]) -> None:
        if not kernel(STREAM_ON(device), tensors, others):
            run(*tensors, *others)

    return launch


def native_kernel(compiled: Any, grid: tuple[int, int, int]) -> Any:
    """The kernel with its grid, to be launched by C++; None where Triton is to launch it.

    The driver is asked whether the kernel takes what would be passed: another Triton may pass more.
    """
    library = built()
    if library is None:
        return None
    try:
        about, kinds = compiled.metadata, [_kind(kind) for kind in compiled.src.signature.values()]
        wants_more = any(getattr(about, name, 0) for name in WANTS) or about.num_ctas != 1
        sizes = (WARP * about.num_warps, about.shared)
        handle = compiled.function
    except (AttributeError, KeyError):
        return None  # of another make
    if wants_more:
        return None
    kernel = library.Kernel(handle, kinds, list(grid), *sizes, compiled)
    return kernel if kernel.is_as_expected() else None


def _kind(kind: str) -> str:
    return "*" if kind.startswith("*") else KINDS[kind]
