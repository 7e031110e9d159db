"""Experts by one grouped product (``F.grouped_mm``, the default of transformers): plain gradient.

It is linear in its weights, and still no T acts there. torch.compile does not show it to torch
function modes (``torch._grouped_mm`` is not overridable), so a compiled model would train by its
plain gradient where an eager one would not, and nobody would be told. The first test here fails
when torch changes that. Experts as modules or slices are transformed; ``explain`` tells of these.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from virtualgrad import SVGD, explain

BATCH, LENGTH, WIDTH, FEATURES, EXPERTS = 6, 2, 16, 8, 3
ENDS = torch.tensor([5, 5, BATCH * LENGTH], dtype=torch.int32)  # the second expert gets no rows


class Experts(nn.Module):
    """Rows are sorted by expert already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(EXPERTS, FEATURES, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.first(x)).flatten(0, 1)
        return F.grouped_mm(rows, self.weights.mT, offs=ENDS).view(len(x), -1)


class Doubled(TorchFunctionMode):
    """Doubles grouped products, wherever it sees one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in (torch._grouped_mm, F.grouped_mm) else result


def test_a_compiler_does_not_show_it_to_function_modes() -> None:
    rows, weights = torch.ones(12, WIDTH).bfloat16(), torch.ones(EXPERTS, WIDTH, FEATURES)

    def product(rows: Tensor, weights: Tensor) -> Tensor:
        with Doubled():
            return F.grouped_mm(rows, weights.bfloat16(), offs=ENDS)

    compiled = torch.compile(product, fullgraph=True, backend="eager")
    assert product(rows, weights).unique().tolist() == [2 * WIDTH]
    assert compiled(rows, weights).unique().tolist() == [WIDTH]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_plain_gradient_compiled_or_not(compiled: bool) -> None:
    """In bfloat16, which is all that torch compiles of it."""
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    model, plain = Experts().bfloat16(), Experts().bfloat16()
    optimizer = SVGD(model, 0.05, share_positions=True)
    run: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    for one in (run, plain):
        one(x).square().sum(1).mean().backward()
    torch.testing.assert_close(model.weights.grad, plain.weights.grad, rtol=0.02, atol=0.02)
    found, expected = model.first.weight.grad, plain.first.weight.grad
    assert found is not None and expected is not None
    assert (found - expected).norm() > 0.1 * expected.norm()  # T acts beside it
    optimizer.step()
    assert list(optimizer.operator.state) == ["first:linear(weight)"]


def test_explain_tells() -> None:
    explanation = explain(Experts(), torch.randn(BATCH, LENGTH, WIDTH))
    assert list(explanation.uncovered) == ["weights"]
    assert "grouped_mm" in explanation.uncovered["weights"]
