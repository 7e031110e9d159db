"""Promise 1: autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from virtualgrad import SVGD


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


@pytest.mark.usefixtures("without_onednn")
def test_what_is_left_out_has_its_plain_gradient_from_the_first_pass_on() -> None:
    """``where`` is asked before an op runs: autocast must keep nothing of that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    plain, x = copy.deepcopy(model), torch.randn(64, 16)
    with SVGD(model, 0.1, where=lambda site: False):
        for network in (model, plain):
            with torch.autocast("cpu", torch.bfloat16):
                network(x).float().square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
