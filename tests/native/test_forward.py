"""Modules that C++ runs again: they train as those that Python runs, and are seen to change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from both_languages import LR, READINGS, assert_same
from modes import Counting
from torch import Tensor, nn

from virtualgrad import SVGD, native
from virtualgrad.virtual import Attachment

pytestmark = pytest.mark.usefixtures("in_cpp")

STEPS, CHANGED_AT = 8, 4


class Block(nn.Module):
    """A container whose forward is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu_() + self.conv(x)


class Network(nn.Module):
    """Containers in containers, layers of each kind that is known, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(Block(), nn.Sequential(Block(), nn.ReLU()), nn.Flatten())
        self.head = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 6), nn.GELU(), nn.Linear(6, 4))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.gain


Change = Callable[[Any], None]


def train(reading: str, change: Change = lambda model: None, images: int = 4) -> list[Tensor]:
    """What training leaves behind; the model changes when all of it is known."""
    model = Network()
    optimizer = READINGS[reading](model)
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    for step in range(STEPS):
        if step == CHANGED_AT:
            change(model)
        size = images + (step == STEPS - 1)
        x = torch.randn(size, 3, 4, 4, generator=generator).requires_grad_()
        optimizer.zero_grad()
        sigma = model(x)
        sigma.square().mean().backward()
        optimizer.step()
        assert x.grad is not None
        found += [sigma.detach(), x.grad]
    optimizer.detach()
    found += [each.detach() for each in (*model.parameters(), *model.buffers())]
    return found


@contextmanager
def in_python() -> Iterator[None]:
    native.use(False)
    try:
        yield
    finally:
        native.use(True)


def hooked(model: Network) -> None:
    model.head[1].register_forward_hook(lambda module, inputs, output: output * model.gain[0])
    model.body[0].register_forward_pre_hook(lambda module, inputs: inputs[0] * model.gain[1])


def frozen(model: Network) -> None:
    model.body[0].conv.weight.requires_grad_(False)
    model.head[3].bias.requires_grad_(False)
    model.head[0].weight.requires_grad_(False)


def other_weights(model: Network) -> None:
    first, second = model.body[0], model.body[1][0]
    second.conv.weight = first.conv.weight
    model.head[1].weight.data = 2 * model.head[1].weight.data


def other_modules(model: Network) -> None:
    model.body[1][1] = nn.Tanh()
    model.head[2] = nn.Sequential(nn.ReLU(), nn.Identity())


def other_options(model: Network) -> None:
    model.body[0].conv.padding = model.body[0].conv.dilation = (2, 2)
    model.body[0].norm.momentum, model.head[0].eps = 0.5, 0.1


def other_forwards(model: Network) -> None:
    linear, block = model.head[1], model.body[1][0]
    linear.forward = lambda x: F.linear(x, linear.weight * 2)
    block.forward = lambda x: block.norm(x) + block.conv.bias.sum()


def in_double(model: Network) -> None:
    model.register_forward_pre_hook(lambda module, inputs: inputs[0].double())
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for norm in (model.body[0].norm, model.body[1][0].norm):
        norm.running_mean, norm.running_var = norm.running_mean.double(), norm.running_var.double()


CHANGES: dict[str, Change] = {
    "none": lambda model: None,
    "eval": lambda model: model.eval(),
    "hooks": hooked,
    "frozen": frozen,
    "other weights": other_weights,
    "other modules": other_modules,
    "other options": other_options,
    "other forwards": other_forwards,
}


@pytest.mark.filterwarnings("ignore:.*have come to Network:UserWarning")
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, reading: str) -> None:
    with in_python():
        theirs = train(reading, CHANGES[change])
    assert_same(train(reading, CHANGES[change]), theirs)


def test_another_dtype_is_seen() -> None:
    """(r keeps the one that it was begun with, and refuses others: this is an operator without.)"""
    with in_python():
        theirs = train("sign", in_double)
    assert_same(train("sign", in_double), theirs)


def test_layers_and_containers_run_by_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they are known, Python runs the model and nothing in it."""
    asked: list[str] = []
    call = Attachment.call

    def noting(self: Attachment, path: str, *args: Any) -> Any:
        asked.append(path)
        return call(self, path, *args)

    monkeypatch.setattr(Attachment, "call", noting)
    model = Network()
    with SVGD.released(model, LR) as optimizer:
        for _ in range(STEPS):
            asked.clear()
            optimizer.zero_grad()
            model(torch.randn(4, 3, 4, 4)).square().mean().backward()
            optimizer.step()
    assert asked == [""]


def test_modes_of_users_see_the_ops() -> None:
    model, x = Network(), torch.randn(4, 3, 4, 4)
    with SVGD.released(model, LR) as optimizer:
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with Counting() as counting:
            model(x)
    assert counting.seen.count(F.linear) == 2
    assert counting.seen.count(torch.conv2d) == 4


def test_paths_of_containers_are_those_of_python() -> None:
    """What a container does with its own parameters is a site under its name."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.gain

    def sites(model: nn.Module) -> set[str]:
        optimizer = SVGD(model, LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        found = optimizer.operator.state  # type: ignore[union-attr]
        optimizer.detach()
        return set(found)

    def model() -> nn.Module:
        return nn.Sequential(Scaled(), nn.Sequential(Scaled()))

    with in_python():
        theirs = sites(model())
    assert sites(model()) == theirs
    assert any(key.startswith("1.0") for key in theirs)


def test_an_error_in_a_container_leaves_the_model_as_it_was() -> None:
    model, x = Network(), torch.randn(4, 3, 4, 4)
    with SVGD.released(model, LR) as optimizer:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 5, 4, 4))
        assert optimizer._attachment is not None
        assert optimizer._attachment.intercept.path is None
        assert all(type(each) is nn.Parameter for each in model.parameters())
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def test_a_model_that_has_its_optimizer_goes_with_it() -> None:
    """C++ has the model, and the model, by its class, has that: a circle that Python must see."""
    model: Any = Network()
    model.optimizer = SVGD(model, LR)
    for _ in range(STEPS):
        model.optimizer.zero_grad()
        model(torch.randn(4, 3, 4, 4)).sum().backward()
        model.optimizer.step()
    assert model.optimizer._attachment.intercept.in_cpp.run is not None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
