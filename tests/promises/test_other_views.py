"""What looks at a model in torch's other ways fails while attached, and works on a detached one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.jit import TracingCheckError
from torch.jit.frontend import NotSupportedError

from virtualgrad import SVGD

X = torch.randn(8, 4)
ERRORS = (RuntimeError, ValueError, NotSupportedError, TracingCheckError)  # torch's own


def forward_mode(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(X, X))


def jagged(model: nn.Module) -> None:
    rows = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
    model(rows).values().sum().backward()


VIEWS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, X),
    "symbolic-trace": torch.fx.symbolic_trace,
    "forward-mode": forward_mode,
    "stacked-models": lambda model: torch.func.stack_module_state([model, copy.deepcopy(model)]),
    "jagged": jagged,
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@pytest.mark.parametrize("name", VIEWS)
def test_fails_while_attached_and_works_after_detach(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    VIEWS[name](model)
    optimizer = SVGD(model, lr=0.1, scale=0.01)
    with pytest.raises(ERRORS):
        VIEWS[name](model)
    optimizer.detach()
    VIEWS[name](model)
