"""Gradients taken by ``torch.autograd.grad``, or for some parameters: beside training, or for it.

The oracle is the same gradient by one ``backward()``, or by graphs of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from twin import LR, SCALE

from virtualgrad import SVGD, VirtualGradientDescent
from virtualgrad.errors import TransformError
from virtualgrad.operators import RMS, Clip, compose

BATCH = 6
READINGS: dict[str, dict[str, Any]] = {"r of before": {"stale": True}, "r updated first": {}}


class Product(nn.Module):
    """x W, by the sign for it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [nn.Linear(4, 5)],
    "product": lambda: [Product(4, 5)],
    "layer norm": lambda: [nn.LayerNorm(4), nn.Linear(4, 5)],
    "batch norm": lambda: [nn.BatchNorm1d(4), nn.Linear(4, 5)],
    "convolution": lambda: [nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 5, 4), nn.Flatten()],
}


def network(layers: str = "linear") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*LAYERS[layers](), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(seed)).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(3).mean()


def r_of(optimizer: Any) -> dict[str, Tensor]:
    return copy.deepcopy({key: state["r"] for key, state in optimizer.operator.state.items()})


def committed(optimizer: SVGD) -> dict[str, Tensor]:
    optimizer.step()
    return r_of(optimizer)


def all_at_once(loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, parameters)


def one_by_one(loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.autograd.grad(loss, p, retain_graph=True)[0] for p in parameters)


def in_two_calls(loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    loss.backward(inputs=[p for p in parameters if p.dim() > 1], retain_graph=True)
    loss.backward(inputs=[p for p in parameters if p.dim() == 1])
    return tuple(p.grad for p in parameters)


def attacked(model: nn.Module, optimizer: SVGD, attack_steps: int, *, drop: bool) -> None:
    """A step of adversarial training; ``drop`` the graph of each attack before the next."""
    optimizer.zero_grad()
    z = batch(attack_steps)
    for _ in range(attack_steps):
        z.requires_grad_()
        loss = loss_of(model, z)
        (g,) = torch.autograd.grad(loss, z)
        z = (z + 0.1 * g.sign()).detach()
        if drop:
            del loss
    loss_of(model, z).backward()
    optimizer.step()


@pytest.mark.parametrize("layers", LAYERS)
def test_adversarial_training_does_not_shift_the_sites(layers: str) -> None:
    """The last attack's loss is still alive in the next forward pass, its graph freed."""
    found = []
    for drop in (False, True):
        model = network(layers)
        optimizer = SVGD(model, LR, scale=SCALE)
        for attack_steps in (1, 2, 3, 1):
            attacked(model, optimizer, attack_steps, drop=drop)
        found.append({**r_of(optimizer), **model.state_dict()})
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("take", [one_by_one, in_two_calls])
def test_parameter_by_parameter_is_all_at_once(take: Any, layers: str, reading: str) -> None:
    found = []
    for way in (take, all_at_once):
        model = network(layers)
        optimizer = SVGD(model, LR, scale=SCALE, **READINGS[reading])
        for seed in (1, 2):
            gradients = way(loss_of(model, batch(seed)), list(model.parameters()))
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            r = committed(optimizer)
            optimizer.zero_grad()
        found.append((gradients, r))
    torch.testing.assert_close(*found, rtol=1e-10, atol=0)


def test_two_losses_parameter_by_parameter_are_one_gradient() -> None:
    """With the r of before: gradients and r are those of the summed loss."""
    found = []
    for is_summed in (False, True):
        model = network()
        optimizer = SVGD(model, LR, scale=SCALE, stale=True)
        y = model(batch())
        losses = (y.cos().mean(), y.sin().mean())
        for p in model.parameters():
            for loss in [sum(losses)] if is_summed else losses:
                (gradient,) = torch.autograd.grad(loss, p, retain_graph=True)
                p.grad = gradient if p.grad is None else p.grad + gradient
        gradients = [p.grad.clone() for p in model.parameters()]
        found.append((gradients, committed(optimizer)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gradient_taken_for_a_look_is_not_counted(when: str, layers: str, reading: str) -> None:
    """As the weight between two losses of an adversarial autoencoder is found."""
    found = []
    for looks in (True, False):
        model = network(layers)
        optimizer = SVGD(model, LR, scale=SCALE, **READINGS[reading])
        for seed in (1, 2):
            optimizer.zero_grad()
            y = model(batch(seed))
            loss = y.pow(3).mean()
            looked = [next(model.parameters()), model[-1].weight]
            if looks and when == "before":
                torch.autograd.grad(loss, looked, retain_graph=True)
                torch.autograd.grad(y.cos().mean(), looked, retain_graph=True)
            loss.backward(retain_graph=True)
            if looks and when == "after":
                torch.autograd.grad(y.cos().mean(), looked, retain_graph=True)
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        found.append((gradients, r_of(optimizer)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_batch_of_gradients_is_refused_where_t_acts(layers: str) -> None:
    model = network(layers)
    optimizer = SVGD(model, LR)
    x = batch().requires_grad_()
    y = model(x)
    several = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)

    def take(of: Any) -> Any:
        return torch.autograd.grad(y, of, several, is_grads_batched=True, retain_graph=True)

    with pytest.raises(TransformError, match=r"is_grads_batched=True.*one by one"):
        take(list(model.parameters()))
    assert not optimizer.operator.has_prepared()
    if layers == "linear":  # the input's are as without T
        (found,) = take(x)
        with optimizer:
            pass
        (expected,) = torch.autograd.grad(model(x), x, several, is_grads_batched=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("x_needs_grad", [False, True])
def test_a_product_goes_back_after_a_step_as_with_sgd(x_needs_grad: bool) -> None:
    """The factor that the step changes is saved only for the gradient of the other one."""
    raised = []
    for make in (lambda m: torch.optim.SGD(m.parameters(), LR), lambda m: SVGD(m, LR)):
        torch.manual_seed(0)
        model = Product(4, 5).double()
        optimizer = make(model)
        loss = loss_of(model, batch().requires_grad_(x_needs_grad))
        loss.backward(retain_graph=True)
        optimizer.step()
        try:
            loss.backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised.append(True)
        else:
            raised.append(False)
    assert raised == [x_needs_grad, x_needs_grad]


COMPOSED: dict[str, Callable[..., Any]] = {
    "alone": lambda **options: compose(RMS(SCALE, **options)),
    "with what is linear": lambda **options: compose(lambda g, _: 2 * g, RMS(SCALE, **options)),
    "behind what is linear": lambda **options: compose(RMS(SCALE, **options), lambda g, _: 2 * g),
    "below a Clip": lambda **options: compose(Clip(1e9), RMS(SCALE, **options)),
    "of two": lambda **options: compose(RMS(SCALE, **options), RMS(SCALE, **options)),
}


@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["loss as it is", "loss scaled"])
@pytest.mark.parametrize("name", COMPOSED)
def test_passes_through_one_graph_are_one_to_a_composition(name: str, scale: float) -> None:
    """With the r of before: gradients and r are those of the summed loss."""
    found = []
    for is_summed in (False, True):
        model = network()
        operator = COMPOSED[name](stale=True)
        optimizer = VirtualGradientDescent(
            model, LR, operator, grad_scaler=GradScaler("cpu", init_scale=scale)
        )
        for seed in (1, 2):
            optimizer.zero_grad()
            y = model(batch(seed))
            first, second = scale * y.cos().mean(), scale * y.pow(3).mean()
            if is_summed:
                (first + second).backward()
            else:
                first.backward(retain_graph=True)
                second.backward()
            gradients = [p.grad / scale for p in model.parameters()]
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        found.append((gradients, copy.deepcopy(operator.state)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-13)


def by_backward(model: nn.Module) -> None:
    for seed in (1, 2, 3):
        loss_of(model, batch(seed)).backward()


def into_grad_at_once(model: nn.Module) -> None:
    parameters = list(model.parameters())
    for seed in (1, 2, 3):
        gradients = torch.autograd.grad(loss_of(model, batch(seed)), parameters)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient


def into_grad_at_the_end(model: nn.Module) -> None:
    parameters = list(model.parameters())
    parts = [torch.autograd.grad(loss_of(model, batch(seed)), parameters) for seed in (1, 2, 3)]
    for p, *gradients in zip(parameters, *parts, strict=True):
        p.grad = sum(gradients[1:], gradients[0])


@pytest.mark.parametrize("reading", READINGS)
def test_micro_batches_added_up_by_hand(reading: str) -> None:
    """As documented: in ``.grad`` after each of them; kept elsewhere, they seem thrown away."""
    found = {}
    for way in (by_backward, into_grad_at_once, into_grad_at_the_end):
        model = network()
        optimizer = SVGD(model, LR, scale=SCALE, **READINGS[reading])
        way(model)
        found[way.__name__] = {**committed(optimizer), **model.state_dict()}
    torch.testing.assert_close(
        found["into_grad_at_once"], found["by_backward"], rtol=1e-10, atol=1e-13
    )
    model = network()
    optimizer = SVGD(model, LR, scale=SCALE, **READINGS[reading])
    loss_of(model, batch(3)).backward()
    last = committed(optimizer)
    of_last = {key: found["into_grad_at_the_end"][key] for key in last}
    torch.testing.assert_close(of_last, last, rtol=1e-10, atol=1e-13)
