"""Training in compiled and in eager passes, to be compared, and which way a compiled op was run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.virtual import runs


def watch(monkeypatch: pytest.MonkeyPatch, way: Callable[..., Tensor | None]) -> list[bool]:
    """Whether each op at a site was run in a way of :mod:`virtualgrad.virtual.runs`, once asked."""
    seen: list[bool] = []

    def watched(*args: Any) -> Tensor | None:
        result = way(*args)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(runs, way.__name__, watched)
    return seen


def trained(
    model: nn.Module, sample: tuple[int, ...], compiled: bool, **options: Any
) -> list[Tensor]:
    """The gradients of two steps, the second of two micro-batches of 6 samples."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = SVGD(model, 1e-2, **options)
    found: list[Tensor] = []
    for passes in (1, 2):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(6, *sample, dtype=torch.float64).to(dtype)
            run(x).double().pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found
