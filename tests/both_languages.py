"""Training by nodes of C++ and by those of Python, to the same bits, in every kind of pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, VirtualGradientDescent, native, operators
from virtualgrad.virtual.convolutions import Convolution
from virtualgrad.virtual.layer_norms import LayerNorm
from virtualgrad.virtual.norms import BatchNorm
from virtualgrad.virtual.products import Linear

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Tensor], Tensor]

LR = 1e-3


def frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


READINGS: dict[str, Callable[[nn.Module], VirtualGradientDescent]] = {
    "released": lambda model: SVGD.released(model, LR),
    "Algorithm 1": lambda model: SVGD(model, LR),
    "shared": lambda model: SVGD.released(model, LR, share_positions=True),
    "sign": lambda model: VirtualGradientDescent(model, LR, operators.Sign()),
}


class Network(nn.Module):
    """Two layers of a kind, the first of which is used twice; activations are made in place."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.first, self.second = build(), build()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.first(x), inplace=True)
        sigma: Tensor = self.second(self.first(x) + x)
        return sigma


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    build: Build,
    shape: tuple[int, ...],
    reading: Callable[[nn.Module], VirtualGradientDescent] = READINGS["released"],
    *,
    loss: Loss = square,
    backward: Callable[..., Any] = lambda loss, model, x: loss.backward(),
    autocast: bool = False,
    device: str = "cpu",
) -> tuple[list[Tensor], list[Any]]:
    """What training leaves behind four steps of two micro-batches, and what it has found there.

    The former are parameters, buffers, gradients and r; the latter sigma, what ``backward`` returns
    and the gradient of x.
    """
    torch.manual_seed(0)
    model = Network(build).to(device)
    optimizer = reading(model)
    found: list[Any] = []
    model.register_forward_hook(lambda _, x, sigma: found.append(sigma.detach().clone()))
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(shape).to(device).requires_grad_()
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                value = loss(model, x)
            found.append(backward(value, model, x))
            found.append(x.grad)
        optimizer.step()
    kept = [*model.parameters(), *model.buffers()]
    kept += [p.grad for p in model.parameters() if p.grad is not None]
    states = optimizer.state_dict()["state"].values()
    r = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    return [each.detach().clone() for each in (*kept, *r)], found


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    else:
        assert ours is theirs is None


def train_both_ways(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> None:
    """As nodes of C++ and as nodes of Python, to the same bits."""
    native.use(False)
    try:
        theirs = train(*args, **options)
    finally:
        native.use(True)
    with monkeypatch.context() as off:  # it is C++ indeed
        for function in (Linear, Convolution, BatchNorm, LayerNorm):
            off.setattr(function, "forward", None)
        ours = train(*args, **options)
    assert_same(ours, theirs)


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    sigma: Tensor = checkpoint(model, x, use_reentrant=False)
    return sigma.square().mean()


def with_hooks_on_saved(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda kept: kept[0]):
        return square(model, x)


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + sum(p.abs().sum() for p in model.parameters() if p.requires_grad)


def twice(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def looked_at_first(loss: Tensor, model: nn.Module, x: Tensor) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    return found


def for_input_first(loss: Tensor, model: nn.Module, x: Tensor) -> Any:
    found = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return found


def for_some(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(inputs=[model.first.weight, x])  # type: ignore[list-item,union-attr]


LOSSES: dict[str, Loss] = {
    "checkpointed": checkpointed,
    "hooks on saved tensors": with_hooks_on_saved,
    "a penalty": with_penalty,
}
BACKWARDS: dict[str, Callable[..., Any]] = {
    "twice": twice,
    "looked at first": looked_at_first,
    "for the input first": for_input_first,
    "for some": for_some,
}
