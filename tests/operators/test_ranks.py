"""How statistics travel between processes: one buffer, with the counts in front.

That several processes then equal one is tested in ``tests/promises/test_ddp.py``; here one process
is enough, whose sums over all ranks are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from virtualgrad.operators.ranks import DIGIT, Ranks, _as_digits, _from_digits
from virtualgrad.operators.running import Running


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    meeting = (tmp_path / "meeting").as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        yield Ranks(distributed.group.WORLD, torch.device("cpu"))
    finally:
        distributed.destroy_process_group()


@pytest.fixture
def reductions(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What is reduced over all ranks."""
    seen: list[Tensor] = []
    reduce = distributed.all_reduce

    def noting(tensor: Tensor, **options: Any) -> Any:
        seen.append(tensor.clone())
        return reduce(tensor, **options)

    monkeypatch.setattr(distributed, "all_reduce", noting)
    return seen


def sampled(norm: Tensor, elements: int, samples: int) -> Running:
    running = Running(torch.zeros_like(norm), committed=False)
    running.add_samples(norm, elements, samples)
    return running


def test_counts_beyond_what_float32_can_hold_arrive_exactly() -> None:
    counts = [0, 1, DIGIT - 1, DIGIT, 8191, 2**24 - 1]
    ranks = 4096
    on_all = torch.zeros(2 * len(counts))
    for _ in range(ranks):
        on_all += torch.tensor(_as_digits(counts), dtype=torch.float32)
    assert _from_digits(on_all.tolist()) == [ranks * count for count in counts]


def test_one_reduction_for_all_sites_once_they_are_known(
    ranks: Ranks, reductions: list[Tensor]
) -> None:
    norms = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.rand(2, 2)}
    for step in range(3):
        reductions.clear()
        sites = {key: sampled(norm, 6, 2) for key, norm in norms.items()}
        ranks.sum_all(sites)
        # At first nobody knows of the sites: an empty look, then they are agreed on.
        assert len(reductions) == (2 if step == 0 else 1)
        for key, norm in norms.items():
            torch.testing.assert_close(sites[key].norm, norm)
            assert (sites[key].elements, sites[key].samples) == (6, 2)
    assert reductions[-1].numel() == 3 + 4 + 2 * (1 + 2 * len(norms))


def test_a_site_that_nobody_reached_stays(ranks: Ranks, reductions: list[Tensor]) -> None:
    ranks.sum_all({"a": sampled(torch.ones(3), 6, 2), "b": sampled(torch.ones(2), 6, 2)})
    reductions.clear()
    left = Running(torch.full((2,), 7.0), committed=True)
    sites = {"a": sampled(torch.ones(3), 6, 2), "b": left}
    ranks.sum_all(sites)
    assert len(reductions) == 1
    assert sites["b"].norm is None
    assert sites["b"].elements == 0
    assert sites["b"].r.tolist() == [7.0, 7.0]


def test_numbers_of_several_kinds(ranks: Ranks, reductions: list[Tensor]) -> None:
    """Complex gradients, float64 and float32: one reduction for each real dtype."""
    complex_g = torch.randn(2, 3, dtype=torch.complex64)
    real_g = torch.randn(4, dtype=torch.float64)

    def sites() -> dict[str, Running]:
        without_samples = {
            "complex": Running(torch.zeros(2, 3), committed=False),
            "double": Running(torch.zeros(4, dtype=torch.float64), committed=False),
        }
        without_samples["complex"].add_gradient(complex_g)
        without_samples["double"].add_gradient(real_g)
        return {"single": sampled(torch.rand(3), 6, 2), **without_samples}

    ranks.sum_all(sites())
    reductions.clear()
    found = sites()
    single = found["single"].norm
    ranks.sum_all(found)
    assert [tensor.dtype for tensor in reductions] == [torch.float32, torch.float64]
    assert single is not None
    torch.testing.assert_close(found["single"].norm, single)
    torch.testing.assert_close(found["complex"].gradient, complex_g)
    torch.testing.assert_close(found["double"].gradient, real_g)
