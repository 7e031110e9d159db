"""A pass sees the ops of its own thread: what runs in others is refused, never silently plain."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, errors, operators, virtual_grad


class Parallel(nn.Module):
    """Two layers, run by a pool of threads or one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.in_threads = True

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.first, self.second)
        if self.in_threads:
            with ThreadPoolExecutor(2) as pool:
                a, b = pool.map(lambda layer: layer(x), layers)
        else:
            a, b = (layer(x) for layer in layers)
        return a * b.tanh()


class Meeting(nn.Module):
    """A layer that waits in its forward until another thread has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor, waits: bool = False) -> Tensor:
        if waits:
            self.inside.set()
            assert self.go_on.wait(30)
        return self.layer(x)


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def assert_virtual(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """The gradients are those of T, as the recorded graph of a plain copy has them."""
    plain = copy.deepcopy(model)
    expected = virtual_grad(loss(plain), list(plain.parameters()), operators.RMS(), batch_size=8)
    model.zero_grad()
    loss(model).backward()
    for p, v in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, v, rtol=1e-12, atol=1e-14)


def parallel() -> tuple[Parallel, SVGD, Tensor]:
    torch.manual_seed(0)
    model = Parallel().double()
    return model, SVGD(model, 0.1), torch.randn(8, 4).double()


def test_layers_in_other_threads_than_their_pass_are_refused() -> None:
    model, optimizer, x = parallel()
    for _ in range(2):  # what is remembered of a layer does not hide its thread
        model.in_threads = True
        with pytest.raises(
            errors.ModelError, match=r"'(first|second)'.* another thread.*copy\.deepcopy"
        ):
            model(x)
        model.in_threads = False
        assert_virtual(model, lambda run: run(x).square().mean())
    optimizer.step()


def test_two_threads_in_one_model_at_the_same_time() -> None:
    """The second is refused; the first goes on as if nothing had been."""
    torch.manual_seed(0)
    model = Meeting().double()
    plain = nn.Linear(4, 3).double()
    plain.load_state_dict(model.layer.state_dict())
    x = torch.randn(8, 4).double()
    with SVGD(model, 0.1), ThreadPoolExecutor(1) as pool:
        other = pool.submit(model, x, True)
        assert model.inside.wait(30)
        with pytest.raises(errors.ModelError, match=r"'\(model\)'.* another thread"):
            model(x)
        with torch.no_grad():  # needs no pass
            assert torch.equal(model.layer(x), plain(x))
        model.go_on.set()
        other.result().square().mean().backward()
    expected = virtual_grad(
        plain(x).square().mean(), list(plain.parameters()), operators.RMS(), batch_size=8
    )
    for p, v in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, v, rtol=1e-12, atol=1e-14)


def test_passes_in_turns_may_be_in_any_thread() -> None:
    model, optimizer, x = parallel()
    model.in_threads = False
    assert_virtual(model, lambda run: in_a_thread(run, x).square().mean())
    assert_virtual(model, lambda run: (in_a_thread(run.first, x) * run.second(x)).sin().mean())
    optimizer.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_in_another_thread_recomputes_checkpoints(reentrant: bool) -> None:
    """As autograd's own threads do on a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4).double().requires_grad_()
    expected = virtual_grad(
        plain(x).square().mean(), list(plain.parameters()), operators.RMS(), batch_size=8
    )
    with SVGD(model, 0.1):
        loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
        in_a_thread(loss.backward)
    for p, v in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, v, rtol=1e-12, atol=1e-14)
