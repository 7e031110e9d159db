"""Where commands compute: the device that is asked for, and how it is set up."""

from __future__ import annotations

import torch
import typer

from virtualgrad.lab.run import Setup

RUNS_AT_ONCE_ON_GPU = 5
"""Small networks side by side: ten gain nothing over five on an H200."""


def device_named(name: str) -> torch.device:
    """The device that is asked for, if it is there."""
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdecimal()):
        raise typer.BadParameter(f"{name!r} is none of auto, cpu, cuda", param_hint="--device")
    if kind == "cuda" and int(number or 0) >= count:
        raise typer.BadParameter(
            f"{name!r}, but PyTorch finds {count} CUDA devices here; "
            "use cpu or auto, or install PyTorch for CUDA",
            param_hint="--device",
        )
    return torch.device(name)


def setup_named(name: str, *, amp: bool = False, compiled: bool = False) -> Setup:
    """How runs are made on the device that is asked for."""
    device = device_named(name)
    return Setup(device, amp=amp, channels_last=device.type == "cuda", compiled=compiled)


def choose_fast_kernels(device: torch.device) -> None:
    """Let a GPU try kernels out, and multiply in TF32; global, so only for who owns the process."""
    if device.type == "cuda":  # pragma: no cover - needs a GPU
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


def runs_at_once(asked: int | None, device: torch.device) -> int:
    """How many runs are made side by side."""
    return asked or (RUNS_AT_ONCE_ON_GPU if device.type == "cuda" else 1)
