"""Compiled models have the virtual gradients of eager ones: on every case, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, loss_of
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from virtualgrad.operators import RMS, Operator, Sign, StatefulOperator
from virtualgrad.sites import Site, Where, every_linear_site
from virtualgrad.virtual import Attachment, Intercept, named_parameters

OPERATORS: dict[str, Callable[[], Operator]] = {
    "sign": Sign,
    "rms": RMS,
    "rms, stale": lambda: RMS(stale=True),
    "rms, shared": lambda: RMS(per_sample=False, share_positions=True),
    "rms, by rows": lambda: RMS(per_sample=False, share_positions=True, stale=True),
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

# A parameter that an op hands back as it is has no name there.
NOT_TRACED_BEFORE_2_13 = ("raw views of several tensors", "spectral norm, eval")
EVERY_OPERATOR_ON = ("linear on sequences", "conv2d", "raw views", "no sample axis", "reused")


@pytest.mark.parametrize(
    ("case", "operator"),
    [(case, "rms") for case in CASES]
    + [(case, operator) for case in EVERY_OPERATOR_ON for operator in OPERATORS],
)
def test_compiled_equals_eager(case: str, operator: str) -> None:
    if case in NOT_TRACED_BEFORE_2_13 and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11 does not trace it")
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


class Convolutions(nn.Module):
    """Batched, grouped, without a bias, and a linear layer on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2, bias=False)
        self.linear = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.grouped(self.first(x).relu()).flatten(2))


def is_of_weight(site: Site) -> bool:
    return site.roles == ("weight",)


def pull_backs(
    operator: str, *, dynamic: bool = False, where: Where = every_linear_site
) -> list[list[bool]]:
    """Of every convolution in the compiled backward pass, whether x, weight and bias are asked."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    model = Convolutions()
    Attachment(model, Intercept(named_parameters(model), OPERATORS[operator](), where=where))
    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=keep)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    run(torch.randn(4, 3, 8, 8)).square().mean().backward()
    (graph,) = graphs
    target = torch.ops.aten.convolution_backward.default
    return [node.args[-1] for node in graph.graph.nodes if node.target is target]


@pytest.mark.parametrize("dynamic", [False, True])
def test_by_rows_one_g_serves_input_and_weight(dynamic: bool) -> None:
    # Of the second convolution: its input needs a gradient, too.
    one = pull_backs("rms, by rows", dynamic=dynamic)
    assert one == [[True, True, False], [False, True, True]]
    # r is updated first: T(g) is made
    assert len(pull_backs("rms, shared", dynamic=dynamic)) == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bias_that_is_left_out_needs_no_pull_back_of_a_convolution(dynamic: bool) -> None:
    """It is a sum of g; oneDNN would make the weight's gradient for it once more."""
    found = pull_backs("rms, stale", dynamic=dynamic, where=is_of_weight)
    assert found == [[False, True, False], [True, False, False], [False, True, False]]


@pytest.mark.parametrize("operator", ["rms, stale", "rms, by rows"])
def test_a_parameter_that_is_left_out_has_its_plain_gradient(operator: str) -> None:
    model, plain = (Convolutions() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    weights = Intercept(named_parameters(model), OPERATORS[operator](), where=is_of_weight)
    Attachment(model, weights)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 8, 8)
    run(x).square().mean().backward()
    plain(x).square().mean().backward()
    for (name, p), (_, q) in zip(trainable(model), trainable(plain), strict=True):
        # r is 0 before the first step: f is 1 / sqrt(eps) for every row; activations keep g.
        factor = 1e3 if name.endswith("weight") else 1
        torch.testing.assert_close(p.grad, factor * q.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("operator", ["rms, stale", "rms, by rows"])
def test_a_batch_of_nothing_teaches_nothing(operator: str) -> None:
    model, rms = nn.Linear(4, 3), OPERATORS[operator]()
    Attachment(model, Intercept(named_parameters(model), rms))
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    run(torch.randn(5, 2, 4)).square().sum().backward()
    rms.commit()
    (before,) = [state["r"].clone() for state in rms.state.values()]
    run(torch.randn(0, 2, 4)).square().sum().backward()
    rms.commit()
    (after,) = [state["r"] for state in rms.state.values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert before.isfinite().all() and before.any()
