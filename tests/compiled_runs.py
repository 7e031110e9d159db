"""Training in compiled and in eager passes, to be compared, and which way a compiled op was run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

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


def backward_graphs() -> tuple[list[Graph], Any]:
    """A backend that compiles nothing, and the backward graphs that it will have been given."""
    seen: list[Graph] = []

    def forward(module: GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    def backward(module: GraphModule, inputs: Any) -> Any:
        seen.append(module.graph)
        return forward(module, inputs)

    decompositions = select_decomp_table()  # as Inductor has them
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, decompositions=decompositions)
    return seen, backend
