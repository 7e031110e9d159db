"""SyncBatchNorm: a Function of its own on several GPUs, a batch norm everywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import data
from processes import run_ranks
from torch import distributed, nn
from unsupported_ranks import Normalised, not_a_batch_norm, train_normalised

from virtualgrad import SVGD


def train(model: nn.Module, **options: Any) -> tuple[dict[str, Any], list[str]]:
    optimizer = SVGD(model, 1e-2, **options)
    for x in data():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict(), list(optimizer.operator.state)


def test_in_one_process_it_is_batch_norm_bit_for_bit() -> None:
    expected, sites = train(Normalised().double())
    found, same_sites = train(nn.SyncBatchNorm.convert_sync_batchnorm(Normalised().double()))
    assert "norm:batch_norm(weight)" in sites
    assert same_sites == sites
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_torch_refuses_it_on_the_cpu_of_several_processes(tmp_path: Path) -> None:
    """So there is nothing to hold on the CPU; attached or not, the error is torch's own."""
    meeting = (tmp_path / "meeting").as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(Normalised().double())
        optimizer = SVGD(model, 1e-2)
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
            model(data()[0])
        assert not optimizer.operator.has_prepared()
    finally:
        distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{"stale": True}, {}], ids=["r of before", "r updated first"])
def test_two_ranks_are_one_process_whose_norm_has_a_plain_gradient(
    options: dict[str, Any],
) -> None:
    """Two processes may share one GPU through gloo; NCCL would want one each."""
    alone = train_normalised(0, 1, "cuda", options | {"where": not_a_batch_norm})
    for found in run_ranks(2, train_normalised, "cuda", options):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)
