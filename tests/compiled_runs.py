"""Training in compiled and in eager passes, to be compared, and which way a compiled op was run."""

from __future__ import annotations

import copy
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
from virtualgrad.compiling import settled_while_tracing
from virtualgrad.sites import Site
from virtualgrad.virtual import runs


def is_weight(site: Site) -> bool:
    """Weights, those of norms among them."""
    return site.roles == ("weight",)


READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "stale": {"stale": True},
    "shared": {"share_positions": True},
    "shared, stale": {"share_positions": True, "stale": True},
    "per batch": {"per_sample": False},
    "weights only": {"where": is_weight},
    "weights only, stale": {"where": is_weight, "stale": True},
    "weights only, shared": {"where": is_weight, "share_positions": True, "stale": True},
}
"""What T does -> SVGD's options."""


def watch(monkeypatch: pytest.MonkeyPatch, way: Callable[..., Tensor | None]) -> list[bool]:
    """Whether each op at a site was run in a way of :mod:`virtualgrad.virtual.runs`, once asked."""
    seen: list[bool] = []

    @settled_while_tracing  # a list that grows would be compiled for anew at every pass
    def note(has_run: bool) -> None:
        seen.append(has_run)

    def watched(*args: Any) -> Tensor | None:
        result = way(*args)
        note(result is not None)
        return result

    monkeypatch.setattr(runs, way.__name__, watched)
    return seen


def trained(
    model: nn.Module, sample: tuple[int, ...], compiled: bool, **options: Any
) -> list[Tensor]:
    """The gradients of two steps, the second of two micro-batches of 6 samples; compiled once."""
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
            with torch._dynamo.config.patch(error_on_recompile=True):
                run(x).double().pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


def assert_as_in_eager_passes(model: nn.Module, sample: tuple[int, ...], **options: Any) -> None:
    """Of a model in float64: compiled passes bring the gradients of eager ones."""
    eager = trained(copy.deepcopy(model), sample, False, **options)
    for one, other in zip(eager, trained(model, sample, True, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def assert_so_with_a_bias_apart(model: nn.Module, sample: tuple[int, ...], name: str) -> None:
    """The same, where a bias is in a group of its own: two sites in place of one."""

    def groups(one: nn.Module) -> list[dict[str, Any]]:
        named = dict(one.named_parameters())
        bias = named.pop(name)
        return [{"params": list(named.values())}, {"params": [bias], "scale": 0.5}]

    twin = copy.deepcopy(model)
    eager = trained(twin, sample, False, params=groups(twin))
    compiled = trained(model, sample, True, params=groups(model))
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def under_autocast(model: nn.Module, x: Tensor, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """The gradients of a compiled step of two micro-batches under autocast, and the new r."""
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = SVGD(model, 1e-2, **options)
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            loss = run(x).float().square().mean()
        loss.backward()
    optimizer.step()
    state = optimizer.operator.state
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *(state[key]["r"] for key in sorted(state))]


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
