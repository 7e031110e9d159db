"""What is not supported yet raises or warns: it is never silently wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from virtualgrad import SVGD, errors


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("unscale_first", [True, False])
def test_a_grad_scaler_is_refused(unscale_first: bool) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = SVGD(model, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    with pytest.raises(errors.ScaledLossError, match=r"GradScaler.*bfloat16 autocast"):
        scaler.step(optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_disabled_grad_scaler_is_fine() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()
    scaler.step(optimizer)
    assert len(optimizer.operator.state) == 2


def test_several_processes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.warns(UserWarning, match="4 processes: each keeps an r of its own"):
        SVGD(network(), 0.1)


@pytest.fixture
def without_onednn() -> object:
    """Some machines announce bfloat16 instructions that they cannot run."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("convolution", [False, True])
def test_bfloat16_autocast_is_close_to_float32(convolution: bool) -> None:
    torch.manual_seed(0)
    if convolution:
        model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8))
        x = torch.randn(64, 4, 10)
    else:
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32))
        x = torch.randn(64, 16)
    exact = copy.deepcopy(model)
    target = torch.randn_like(exact(x))
    with SVGD(model, 0.1), SVGD(exact, 0.1):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        (output.float() - target).square().mean().backward()
        (exact(x) - target).square().mean().backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() < 0.05 * q.grad.norm()
