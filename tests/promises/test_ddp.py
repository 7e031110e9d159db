"""Promise 5: data parallel training is that of one process with the whole batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import (
    Network,
    alone,
    compiled,
    in_pieces,
    load_shards,
    save_shards,
    scaled,
    several,
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
    """Also with uneven batches, and micro-batches that two ranks have one sample each of."""
    stale, sizes = READINGS["stale, per sample"], [3, 1, 2, 2]
    weights = [1 / 4 / size for size in sizes for _ in range(size)]
    cases = [(reading, given) for reading in READINGS for given in ("ddp", "model")]
    tasks = [("together", (READINGS[reading], given, 1, None)) for reading, given in cases]
    *evenly, uneven, uneven_first, in_micro_batches = each_of(
        4,
        *tasks,
        ("together", (stale, "ddp", 1, sizes)),
        ("together", ({}, "ddp", 1, sizes)),
        ("together", (stale, "ddp", 2, None)),
    )
    for (reading, _), found in zip(cases, evenly, strict=True):
        assert_same(found, alone(READINGS[reading]))
    assert_same(uneven, alone(stale, weights))
    assert_same(uneven_first, alone({}, weights))
    assert_same(in_micro_batches, alone(stale))


def test_no_sync_uneven_batches_and_other_operators() -> None:
    released, weights = READINGS["released"], [1 / 2 / 5] * 5 + [1 / 2 / 3] * 3
    accumulated, unevenly, accumulated_first, uneven, uneven_first, sign, composed = each_of(
        2,
        ("together", (released, "ddp", 2, None)),
        ("together", (released, "ddp", 2, [5, 3])),  # pieces of 3 and 2 here, 2 and 1 there
        ("together", ({}, "model", 2, None)),
        ("together", (released, "ddp", 1, [5, 3])),
        ("together", ({}, "ddp", 1, [5, 3])),
        ("together", ("sign", "model", 1, None)),
        ("together", ("composed", "model", 1, None)),
    )
    assert_same(accumulated, alone(released))
    assert_same(unevenly, alone(released, weights))
    assert_same(accumulated_first, in_pieces({}, 2, 2))  # T goes by the r known by then
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


def test_a_rank_that_has_fewer_batches() -> None:
    """Inside ``ddp.join()``: refused, as the others would wait for ever; or each for itself."""
    stale, first, each_for_itself = each_of(
        2, *[("joined", (options,)) for options in ({"stale": True}, {}, {"process_group": None})]
    )
    for said in (*stale, *first):
        assert said.startswith("ModelError given: a forward pass inside Distr"), said
        assert "process_group=None" in said
    assert each_for_itself == ["no error", "no error"]


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
    released = READINGS["released"]
    sizes = [3, 1] if ranks == 2 else [1, 1]
    stale, first, in_micro_batches, in_float32, in_bfloat16 = each_of(
        ranks,
        ("sharded", ({"stale": True},)),
        ("sharded", ({},)),
        ("sharded_in_pieces", (released, sizes)),
        ("sharded_in_float32", ()),
        ("sharded_in_bfloat16", ()),
    )
    assert_same(stale, alone({"stale": True}))
    assert_same(first, alone({}))
    assert_same(in_micro_batches, alone(released))
    exact, start = alone({"stale": True, "scale": 1e-3}), Network().state_dict()
    for state in in_float32:
        for name, value in exact.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)
    for state in in_bfloat16:
        for name, value in exact.items():
            moved, expected = state[name] - start[name], value - start[name]
            error = (moved - expected).norm() / expected.norm().clamp(min=1e-12)
            assert error < 4 * torch.finfo(torch.bfloat16).eps, f"{name}: {error:.1e}"


def test_a_scaler_skips_on_all_ranks() -> None:
    found = each_of(2, ("scaled", ("ddp",)), ("scaled", ("fsdp",)))
    expected = scaled(0, 1, "alone")
    for states in found:
        assert_same(states, expected)


def test_shards_saved_on_four_ranks_and_loaded_on_two(tmp_path: Path) -> None:
    (expected, *_) = run_ranks(4, save_shards, str(tmp_path))
    assert_same(run_ranks(2, load_shards, str(tmp_path)), expected)
