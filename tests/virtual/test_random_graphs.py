"""The two encapsulations agree to float64 precision on 500 random graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_graphs import BATCH, Program, RandomModel, programs
from torch import Tensor

from virtualgrad import Site, operators, virtual_grad
from virtualgrad.operators import RMS, Operator, StatefulOperator
from virtualgrad.virtual import Attachment, Intercept, named_parameters


def cubic(g: Tensor, site: Site) -> Tensor:
    """Neither linear nor scale-free."""
    assert site.linear
    return g + 10 * g**3


OPERATORS: list[Callable[[], Operator]] = [
    lambda: cubic,
    RMS,
    lambda: RMS(stale=True, per_sample=False),
    lambda: RMS(share_positions=True, loss_reduction="sum"),
]


def largest_error(program: Program, make_operator: Callable[[], Operator]) -> float:
    """Both encapsulations on two steps; the largest relative difference of any gradient."""
    by_ops = RandomModel(program)
    by_topology = copy.deepcopy(by_ops)
    first, second = make_operator(), make_operator()
    errors = [0.0]
    with Attachment(by_ops, Intercept(named_parameters(by_ops), first)):
        for _ in range(2):
            x = by_ops.inputs()
            by_ops.zero_grad()
            loss = by_ops(x)
            loss.backward()
            if isinstance(first, StatefulOperator):
                first.commit()
            reference = by_topology(x)
            assert torch.equal(loss, reference)
            parameters = list(by_topology.named_parameters())
            if reference.requires_grad:
                expected = virtual_grad(
                    reference, parameters, second, allow_unused=True, batch_size=BATCH
                )
                for p, v in zip(by_ops.parameters(), expected, strict=True):
                    assert (p.grad is None) == (v is None)
                    if v is not None:
                        errors.append(float((p.grad - v).norm() / (v.norm() + 1e-12)))
    return max(errors)


@pytest.fixture(autouse=True, scope="module")
def double_precision() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def uses_parameters(program: Program) -> bool:
    quiet = {"no parameter", "in-place relu", "residual in place"}
    return bool(program.penalties) or any(i.op not in quiet for i in program.instructions)


@settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(programs.filter(uses_parameters))
def test_encapsulations_agree_on_random_graphs(program: Program) -> None:
    for make_operator in OPERATORS:
        assert largest_error(program, make_operator) < 1e-10


@settings(max_examples=100, deadline=None, derandomize=True)
@given(programs.filter(uses_parameters))
def test_identity_is_autograd_on_random_graphs(program: Program) -> None:
    model = RandomModel(program)
    plain = copy.deepcopy(model)
    x = model.inputs()
    with Attachment(model, Intercept(named_parameters(model), operators.identity)):
        model(x).backward()
    plain(x).backward()
    by_topology = virtual_grad(plain(x), plain.parameters(), operators.identity, allow_unused=True)
    for p, q, v in zip(model.parameters(), plain.parameters(), by_topology, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(v, q.grad, rtol=1e-12, atol=1e-14)
