"""Graphs of compilers and of users, and modules that C++ would run: T acts once, as it should.

(Found by a review of :mod:`virtualgrad.virtual.marks`, as those of ``test_unmarked_ops.py``.)
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from factors import STEPS, factors, twice
from torch import Tensor, nn

from virtualgrad import VirtualGradientDescent

LOOKS_AT_GRAD = pytest.mark.filterwarnings(  # torch.compile does, at activations
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


class Scaled(nn.Module):
    """A function of a parameter, which users compile."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.linear, self.gain, self.scale = nn.Linear(3, 3), nn.Parameter(torch.rand(3)), scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale(self.linear(x), self.gain)
        return y


@LOOKS_AT_GRAD
def test_a_backend_that_runs_the_graph_in_a_function_of_its_own() -> None:
    def backend(graph: Any, examples: Any) -> Any:
        def run(*args: Any) -> Any:
            return graph(*args)

        return run

    model = Scaled(torch.compile(lambda x, gain: x * gain, backend=backend))
    assert factors(model, lambda: model.gain) == pytest.approx([2] * STEPS)


@LOOKS_AT_GRAD
def test_a_graph_of_the_users_own_that_the_compiler_gives_up() -> None:
    """Then it is run as it is, and its ops are met then."""
    graph = torch.fx.symbolic_trace(lambda x, gain: x * gain)
    model = Scaled(torch.compile(graph, backend="eager"))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        stance = "default" if len(x) % 2 else "force_eager"
        with torch.compiler.set_stance(stance):
            y: Tensor = model(x)
        return y

    assert factors(model, lambda: model.gain, run=run) == pytest.approx([2] * STEPS)


@LOOKS_AT_GRAD
def test_an_exported_graph_is_a_model_as_any_other() -> None:
    """It says that a compiler has made it; but it is a module here, beside one that is compiled."""
    exported: Any = torch._dynamo.export(nn.Linear(3, 3))(torch.randn(4, 3)).graph_module
    model = nn.Sequential(exported, nn.Tanh())
    model[1].compile(backend="eager")
    (weight,) = [each for each in exported.parameters() if each.dim() == 2]
    assert factors(model, lambda: weight) == pytest.approx([2] * STEPS)


# ---------------------------------------------------------------- by C++, where it was built


class Reversed(nn.Sequential):
    """Its modules, the last one first."""

    def __iter__(self) -> Any:
        return iter(reversed(self._modules.values()))


def test_a_sequence_with_an_order_of_its_own() -> None:
    model = nn.Sequential(Reversed(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = model(x)
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    for _ in range(STEPS):
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        model(x).sum().backward()
    optimizer.detach()


def test_a_class_that_is_put_on_top_of_a_known_layer() -> None:
    model: Any = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Flatten())
    optimizer = VirtualGradientDescent(model, 0.0, twice)
    x = torch.randn(4, 3, 2)
    for _ in range(STEPS):
        model(x).sum().backward()
    kind = type(model[0])

    def doubled(self: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv1d(x, 2 * weight, bias)

    model[0].__class__ = type("Top", (kind,), {"_conv_forward": doubled})
    expected = F.conv1d(x, 2 * model[0].weight, model[0].bias).flatten(1)
    torch.testing.assert_close(model(x), expected)
    model[0].__class__ = kind
    optimizer.detach()


def test_an_operator_that_has_the_model_goes_with_it() -> None:
    class Own:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def __call__(self, g: Tensor, site: Any) -> Tensor:
            return g

    model: Any = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    model.optimizer = VirtualGradientDescent(model, 1e-3, Own(model))
    for _ in range(STEPS):
        model(torch.randn(4, 3)).sum().backward()
        model.optimizer.step()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
