"""Layer norm by one forward, against the general way of two, and against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgrad import SVGD
from virtualgrad.virtual import intercept

CALLS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all": lambda x, m: F.layer_norm(x, (4,), m.weight, m.bias, 1e-3),
    "by keywords": lambda x, m: F.layer_norm(
        x, normalized_shape=(4,), eps=1e-3, bias=m.bias, weight=m.weight
    ),
    "a list": lambda x, m: F.layer_norm(x, [4], m.weight, m.bias),
    "no bias": lambda x, m: F.layer_norm(x, (4,), m.weight),
    "no weight": lambda x, m: F.layer_norm(x, (4,), None, m.bias),
    "torch's": lambda x, m: torch.layer_norm(x, (4,), m.weight, m.bias, 1e-3, False),
    "two axes": lambda x, m: F.layer_norm(x, (3, 4), m.weight.expand(3, 4), m.bias.expand(3, 4)),
    "both one": lambda x, m: F.layer_norm(x, (4,), m.weight, m.weight),
}


class Norm(nn.Module):
    """A product, and a norm behind it by one of the calls."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        self.before = nn.Linear(5, 4)
        self.weight, self.bias = (nn.Parameter(torch.randn(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return CALLS[self.call](self.before(x), self)


def steps(model: nn.Module, **options: Any) -> list[Tensor]:
    """The gradients of two steps, and r behind them."""
    optimizer = SVGD(model, 0.1, **options)
    found: list[Tensor] = []
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(6, 3, 5, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().sum(-1).tanh().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    optimizer.detach()
    return found + [state["r"] for state in optimizer.operator.state.values()]


@pytest.mark.parametrize("options", [{}, {"share_positions": True}, {"stale": True}], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_one_forward_gives_what_two_give(
    call: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Norm(call).double()
    twin = copy.deepcopy(model)
    found = steps(model, **options)
    plain = intercept.one_forward
    monkeypatch.setattr(
        intercept,
        "one_forward",
        lambda op, bound: None if op == "layer_norm" else plain(op, bound),
    )
    expected = steps(twin, **options)
    assert len(found) == len(expected) >= 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


class Count(TorchDispatchMode):
    """How often ops of a name ran."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.times = name, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.times += func.name().startswith(f"aten::{self.name}")
        return func(*args, **(kwargs or {}))


def test_a_norm_runs_once() -> None:
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 4), nn.LayerNorm(4, bias=False))
    optimizer = SVGD(model, 0.1)
    for _ in range(2):  # the second time as remembered
        with Count("native_layer_norm") as count:
            loss = model(torch.randn(6, 5)).square().sum()
        assert count.times == 2
        loss.backward()
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [False, True])
def test_under_autocast_a_norm_is_that_of_torch(half: bool) -> None:
    """In float32, whatever comes in, and its gradients in the dtypes of what came in."""
    norm = nn.LayerNorm(16).cuda()
    norm = norm.bfloat16() if half else norm
    x = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = norm(x)
    wanted = (x, norm.weight, norm.bias)
    gradients = torch.autograd.grad(expected.square().sum(), wanted)
    optimizer = SVGD(
        norm, 0.1, scale=1.0, eps=1.0, rho=1.0 - 1e-7, stale=True
    )  # r stays 0: T(g) = g
    with torch.autocast("cuda", dtype=torch.bfloat16):
        sigma = norm(x)
    assert sigma.dtype == expected.dtype == torch.float32
    assert torch.equal(sigma, expected)
    found = torch.autograd.grad(sigma.square().sum(), wanted)
    for one, other, of in zip(found, gradients, wanted, strict=True):
        assert one.dtype == other.dtype == of.dtype
        torch.testing.assert_close(one, other)
    optimizer.detach()
