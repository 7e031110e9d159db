"""A device's memory and streams; on a CPU, nothing of this is known or needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from virtualgrad.lab.bench.timing import Step

PEAK_STEPS = 2


def release(device: torch.device) -> None:
    """Give back a GPU's memory of models that nobody holds any more; a CPU has enough of it."""
    if device.type == "cuda":  # pragma: no cover - needs a GPU
        gc.collect()  # graphs and attached models lie in cycles
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int | None:
    """Bytes in use; None where nobody counts them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_beyond(before: int | None, step: Step, device: torch.device) -> int | None:
    """Most bytes in use during a warm step, beyond what was in use before its model was built.

    So models of other optimizers, which lie there meanwhile, do not count; and the step must be
    warm because cuDNN tries kernels with large workspaces the first time.
    """
    if before is None:
        return None
    torch.cuda.reset_peak_memory_stats(device)  # pragma: no cover - needs a GPU
    for _ in range(PEAK_STEPS):  # pragma: no cover - needs a GPU
        step()
    return torch.cuda.max_memory_allocated(device) - before  # pragma: no cover - needs a GPU


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream that can be captured: gradients remember the stream they were made on."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # pragma: no cover - needs a GPU
        yield
        torch.cuda.synchronize(device)
