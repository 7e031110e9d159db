"""Promise 5: data parallel training is that of one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel import alone, compiled, not_shared, together, with_experts, with_nan, with_sign
from processes import run_ranks
from torch import Tensor

READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "released": {"per_sample": False, "stale": True},
    "stale, per sample": {"stale": True},
    "shared": {"share_positions": True, "stale": True},
}


def assert_same(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for state in found:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("given", ["ddp", "model"])
@pytest.mark.parametrize("reading", READINGS)
def test_two_ranks_are_one_process(reading: str, given: str) -> None:
    found = run_ranks(2, together, READINGS[reading], given, 1, None)
    assert_same(found, alone(READINGS[reading]))


def test_four_ranks_are_one_process() -> None:
    assert_same(run_ranks(4, together, {"stale": True}, "ddp", 1, None), alone({"stale": True}))


def test_accumulation_without_sync() -> None:
    found = run_ranks(2, together, READINGS["released"], "ddp", 2, None)
    assert_same(found, alone(READINGS["released"]))


def test_uneven_batches() -> None:
    weights = [1 / 2 / 5] * 5 + [1 / 2 / 3] * 3  # the mean of the ranks' means
    for reading in ("algorithm 1", "released"):
        found = run_ranks(2, together, READINGS[reading], "ddp", 1, [5, 3])
        assert_same(found, alone(READINGS[reading], weights))


@pytest.mark.parametrize("operator", ["sign", "composed"])
def test_any_operator_sees_its_share_of_the_loss(operator: str) -> None:
    assert_same(run_ranks(2, together, operator, "model", 1, None), alone(operator))


def test_a_layer_that_one_rank_alone_reaches() -> None:
    assert_same(run_ranks(2, with_experts), with_experts(0, 1))


def test_a_process_that_shares_nothing() -> None:
    first, second = run_ranks(2, not_shared)
    assert not torch.equal(first["conv.weight"], second["conv.weight"])


def test_nan_on_one_rank_is_an_error_on_all() -> None:
    assert run_ranks(2, with_nan) == ["NonFiniteError 0", "NonFiniteError 0"]


def test_an_operator_that_needs_the_whole_gradient_is_refused() -> None:
    for said in run_ranks(2, with_sign):
        assert said.startswith("OperatorError"), said
        assert "cumsum(place)" in said
        assert "2 processes" in said


@pytest.mark.parametrize("reading", ["released", "stale, per sample"])
def test_a_compiled_model(reading: str) -> None:
    assert_same(run_ranks(2, compiled, READINGS[reading]), alone(READINGS[reading]))


def test_a_compiled_model_whose_r_is_updated_first_is_refused() -> None:
    with pytest.raises(Exception, match="stale=True"):
        run_ranks(2, compiled, {})
