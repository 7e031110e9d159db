"""EMA and SWA of torch.optim.swa_utils average an attached model as a plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD
from virtualgrad.virtual import attachments_of

AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.8)},
    "EMA with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.8), "use_buffers": True},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(4, 6, bias=False)  # batch norm takes any bias away again
    return nn.Sequential(first, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("average_before_attaching", [True, False])
@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_models(kind: str, average_before_attaching: bool) -> None:
    model = network()
    start, twin = copy.deepcopy(model), Twin(model)
    if average_before_attaching:
        averaged = AveragedModel(model, **AVERAGES[kind])
        optimizer = SVGD(model, LR, scale=SCALE)
    else:
        optimizer = SVGD(model, LR, scale=SCALE)
        averaged = AveragedModel(model, **AVERAGES[kind])
    of_twin = AveragedModel(twin.model, **AVERAGES[kind])
    data = [(torch.randn(8, 4).double(), torch.randint(0, 3, (8,))) for _ in range(6)]
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x), y), batch_size=8)
        twin.optimizer.step()
        averaged.update_parameters(model)
        of_twin.update_parameters(twin.model)
    assert_trained_alike(model, twin.model, start)
    assert_trained_alike(averaged.module, of_twin.module, start)
    assert not torch.equal(averaged.module[0].weight, model[0].weight)  # it is an average
    if kind != "EMA with buffers":
        before = averaged.module[1].running_mean.clone()
        update_bn(data, averaged)
        update_bn(data, of_twin)
        assert not torch.equal(before, averaged.module[1].running_mean)
    for buffer, expected in zip(averaged.buffers(), of_twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-10, atol=1e-13)


def test_the_averaged_model_is_a_plain_one() -> None:
    """Its gradients are autograd's, and running it leaves no trace in the optimizer."""
    model = network()
    optimizer = SVGD(model, LR)
    averaged = AveragedModel(model)
    assert attachments_of(model) and not attachments_of(averaged)
    x, y = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    F.cross_entropy(averaged(x), y).backward()
    optimizer.step()
    assert optimizer.operator.state == {}
    plain = network()
    F.cross_entropy(plain(x), y).backward()
    assert torch.equal(averaged.module[0].weight.grad, plain[0].weight.grad)


def test_update_bn_of_the_attached_model_prepares_nothing() -> None:
    model, reference = network(), network()
    optimizer, undisturbed = SVGD(model, LR), SVGD(reference, LR)
    x, y = torch.randn(8, 4).double(), torch.randint(0, 3, (8,))
    update_bn([x, 2 * x], model)
    for m, o in ((model, optimizer), (reference, undisturbed)):
        F.cross_entropy(m(x), y).backward()
        o.step()
    assert_trained_alike(model, reference)
