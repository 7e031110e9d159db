"""Promise 5: data parallel training is that of one process with the whole batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import (
    alone,
    compiled,
    load_shards,
    save_shards,
    several,
    together,
    with_experts,
)
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


def each_of(ranks: int, *tasks: tuple[str, tuple[Any, ...]]) -> list[list[Any]]:
    """Per task, what every rank found."""
    return [list(found) for found in zip(*run_ranks(ranks, several, list(tasks)), strict=True)]


def test_two_ranks_are_one_process_whichever_model_is_given() -> None:
    cases = [(reading, given) for reading in READINGS for given in ("ddp", "model")]
    tasks = [("together", (READINGS[reading], given, 1, None)) for reading, given in cases]
    for (reading, _), found in zip(cases, each_of(2, *tasks), strict=True):
        assert_same(found, alone(READINGS[reading]))


def test_four_ranks_are_one_process() -> None:
    assert_same(run_ranks(4, together, {"stale": True}, "ddp", 1, None), alone({"stale": True}))


def test_no_sync_uneven_batches_and_other_operators() -> None:
    released, weights = READINGS["released"], [1 / 2 / 5] * 5 + [1 / 2 / 3] * 3
    accumulated, uneven, uneven_first, sign, composed = each_of(
        2,
        ("together", (released, "ddp", 2, None)),
        ("together", (released, "ddp", 1, [5, 3])),
        ("together", ({}, "ddp", 1, [5, 3])),
        ("together", ("sign", "model", 1, None)),
        ("together", ("composed", "model", 1, None)),
    )
    assert_same(accumulated, alone(released))
    assert_same(uneven, alone(released, weights))  # the mean of the ranks' means
    assert_same(uneven_first, alone({}, weights))
    assert_same(sign, alone("sign"))
    assert_same(composed, alone("composed"))


def test_what_one_rank_alone_does() -> None:
    experts, by_itself, nan, refused = each_of(
        2, ("with_experts", ()), ("not_shared", ()), ("with_nan", ()), ("with_sign", ())
    )
    assert_same(experts, with_experts(0, 1))  # a layer that one rank alone reaches
    first, second = by_itself  # process_group=None: a rank that trains alone waits for nobody
    assert not torch.equal(first["conv.weight"], second["conv.weight"])
    assert nan == ["NonFiniteError 0", "NonFiniteError 0"]  # NaN on one rank is an error on all
    for said in refused:
        assert said.startswith("OperatorError"), said
        assert "cumsum(place)" in said
        assert "2 processes" in said


def test_a_compiled_model() -> None:
    readings = ["released", "stale, per sample"]
    tasks = [("compiled", (READINGS[reading],)) for reading in readings]
    for reading, found in zip(readings, each_of(2, *tasks), strict=True):
        assert_same(found, alone(READINGS[reading]))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model_whose_r_is_updated_first_is_refused(fullgraph: bool) -> None:
    """Also where the compiler may leave its graph, as it does at an error that it traces."""
    with pytest.raises(Exception, match="stale=True"):
        run_ranks(2, partial(compiled, fullgraph=fullgraph), {})


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2(ranks: int) -> None:
    stale, first, in_float32 = each_of(
        ranks,
        ("sharded", ({"stale": True},)),
        ("sharded", ({},)),
        ("sharded_in_float32", ()),
    )
    assert_same(stale, alone({"stale": True}))
    assert_same(first, alone({}))
    for state in in_float32:
        for name, value in alone({"stale": True, "scale": 1e-3}).items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_shards_saved_on_four_ranks_and_loaded_on_two(tmp_path: Path) -> None:
    (expected, *_) = run_ranks(4, save_shards, str(tmp_path))
    assert_same(run_ranks(2, load_shards, str(tmp_path)), expected)
