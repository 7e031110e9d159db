"""Compiled models have the virtual gradients of eager ones: on every case, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, loss_of
from torch import Tensor, nn

from virtualgrad.operators import RMS, Operator, Sign, StatefulOperator
from virtualgrad.virtual import Attachment, Intercept, named_parameters

OPERATORS: dict[str, Callable[[], Operator]] = {
    "sign": Sign,
    "rms": RMS,
    "rms, stale": lambda: RMS(stale=True),
    "rms, shared": lambda: RMS(per_sample=False, share_positions=True),
}


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    yield
    torch.set_default_dtype(torch.float32)


# Torch instantiates a Function where it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

EVERY_OPERATOR_ON = ("linear on sequences", "conv2d", "raw views", "no sample axis", "reused")


@pytest.mark.parametrize(
    ("case", "operator"),
    [(case, "rms") for case in CASES]
    + [(case, operator) for case in EVERY_OPERATOR_ON for operator in OPERATORS],
)
def test_compiled_equals_eager(case: str, operator: str) -> None:
    example = CASES[case]
    eager = example.model()
    compiled = copy.deepcopy(eager)
    operators = []
    for model in (eager, compiled):
        made = OPERATORS[operator]()
        intercept = Intercept(named_parameters(model), made, batch_dim=example.batch_dim)
        Attachment(model, intercept)
        operators.append(made)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        inputs = example.inputs()
        for model, call in ((eager, eager), (compiled, run)):
            model.zero_grad()
            loss_of(call(*inputs)).backward()
        for made in operators:
            if isinstance(made, StatefulOperator):
                made.commit()
        for (name, p), (_, q) in zip(trainable(eager), trainable(compiled), strict=True):
            # (A bias before batch norm has a gradient of zero, up to rounding.)
            assert (p.grad - q.grad).norm() < 1e-10 * p.grad.norm() + 1e-13, name
