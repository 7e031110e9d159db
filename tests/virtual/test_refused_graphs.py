"""Graphs that virtual_grad refuses: their ops have a T already, or cannot be seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from virtualgrad import SVGD, errors, operators, virtual_grad

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (6, 4)),
    "convolution": (lambda: nn.Conv1d(4, 3, 1), (6, 4, 2)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "batch norm, eval": (lambda: nn.BatchNorm2d(4).eval(), (6, 4, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm(4), (6, 4)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_one_attached_layer_alone_is_refused(layer: str) -> None:
    make, shape = LAYERS[layer]
    model, x = make(), torch.randn(shape)
    optimizer = SVGD(model, 0.1)
    for _ in range(2):  # the second time by what is remembered of the first
        with pytest.raises(errors.ModelError, match=r"optimizer attached.*detach\(\)"):
            virtual_grad(model(x).square().mean(), model.parameters(), operators.identity)
    assert not optimizer.operator.has_prepared()
    optimizer.detach()
    virtual_grad(model(x).square().mean(), model.parameters(), operators.identity)


@pytest.mark.parametrize(
    ("backend", "attached"), [("aot_eager", False), ("aot_eager", True), ("eager", True)]
)
def test_a_compiled_model_is_refused(backend: str, attached: bool) -> None:
    model = nn.Linear(4, 3)
    optimizer = SVGD(model, 0.1) if attached else None
    loss = torch.compile(model, backend=backend)(torch.randn(6, 4)).square().mean()
    with pytest.raises(errors.ModelError, match=r"a compiler has made.*is not compiled"):
        virtual_grad(loss, model.parameters(), operators.Sign())
    assert optimizer is None or optimizer.operator.state == {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_loss_of_a_plain_model_is_not_refused() -> None:
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    compiled = torch.compile(lambda output: output.square().mean(), backend="aot_eager")
    found = virtual_grad(compiled(model(x)), model.parameters(), operators.Sign())
    plain = virtual_grad(model(x).square().mean(), model.parameters(), operators.Sign())
    for gradient, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(gradient, expected)
