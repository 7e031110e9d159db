"""SyncBatchNorm: over the samples of all processes, and transformed as a batch norm is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import data
from processes import run_ranks
from torch import distributed, nn
from unsupported_ranks import Normalised, train_normalised

from virtualgrad import SVGD, weights_only
from virtualgrad.errors import ModelError
from virtualgrad.virtual import synchronised


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


READINGS = pytest.mark.parametrize(
    "options", [{"stale": True}, {}], ids=["r of before", "r updated first"]
)


@pytest.fixture
def as_if_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that takes the way of several: torch's forward then normalises by itself."""
    monkeypatch.setattr(synchronised, "is_synchronised", lambda module: module.training)


def converted() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(Normalised().double())


@READINGS
@pytest.mark.usefixtures("as_if_synchronised")
def test_normalising_first_and_scaling_then_is_batch_norm(options: dict[str, Any]) -> None:
    expected, sites = train(Normalised().double(), **options)
    found, same_sites = train(converted(), **options)
    assert same_sites == sites  # one r for weight and bias, under the name that batch norm gives it
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.usefixtures("as_if_synchronised")
def test_of_a_frozen_half_the_other_is_transformed(frozen: str) -> None:
    models = Normalised().double(), converted()
    for model in models:
        getattr(model.norm, frozen).requires_grad_(False)
    (expected, _), (found, _) = map(train, models)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.usefixtures("as_if_synchronised")
def test_left_out_it_runs_as_it_is() -> None:
    expected, _ = train(Normalised().double(), where=weights_only)
    found, _ = train(converted(), where=weights_only)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.usefixtures("as_if_synchronised")
def test_in_evaluation_it_is_batch_norm() -> None:
    model, x = converted(), data()[0]
    model(x)  # running means
    expected = model.eval()(x)
    optimizer = SVGD(model, 1e-2)
    assert torch.equal(model(x), expected)
    assert not optimizer.operator.state


@pytest.mark.usefixtures("as_if_synchronised")
def test_a_forward_of_ones_own_is_refused_by_name() -> None:
    class Mine(nn.SyncBatchNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    model = Normalised().double()
    model.norm = Mine(4).double()
    optimizer = SVGD(model, 1e-2)
    with pytest.raises(ModelError, match=r"a forward of its own in norm.*where="):
        model(data()[0])
    assert not optimizer.operator.has_prepared()


@pytest.mark.usefixtures("as_if_synchronised")
def test_compiled_it_is_refused_by_name() -> None:
    model = converted()
    optimizer = SVGD(model, 1e-2)
    run = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="SyncBatchNorm on several processes is not compiled"):
        run(data()[0])
    assert not optimizer.operator.state


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@READINGS
def test_two_ranks_are_one_process_with_batch_norm(options: dict[str, Any]) -> None:
    """Two processes may share one GPU through gloo; NCCL would want one each."""
    alone = train_normalised(0, 1, "cuda", options)
    for found in run_ranks(2, train_normalised, "cuda", options):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_with_weights_alone_are_one_process() -> None:
    options = {"stale": True, "where": weights_only}
    alone = train_normalised(0, 1, "cuda", options)
    for found in run_ranks(2, train_normalised, "cuda", options):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)
