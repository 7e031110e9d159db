"""Images of any size, with ``share_positions=True``: one r for each channel."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD

BATCH, RHO, EPS = 5, 0.9, 1e-6
SIZES = [(9, 9), (6, 11), (5, 5), (12, 7)]  # 5 is also the size of the batch


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 2, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 4),
    ).double()


def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    model = network()
    start, twin = copy.deepcopy(model), Twin(model, share_positions=True)
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    for size in SIZES:
        x, y = torch.randn(BATCH, 2, *size).double(), torch.randint(0, 4, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x), y), BATCH)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model, start)
    shapes = [tuple(state["r"].shape) for state in optimizer.operator.state.values()]
    assert sorted(shapes) == [(3,), (4,), (4,), (4,)]


def test_the_definition() -> None:
    """R is the mean over samples, rows and columns; the pull-back is torch's own."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 3, padding=1).double()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=True)
    r = torch.zeros(4).double()
    for size in SIZES:
        x = torch.randn(BATCH, 2, *size).double()
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
        sigma = F.conv2d(x, weight, bias, padding=1).requires_grad_()
        (g,) = torch.autograd.grad(loss_of(sigma), sigma)
        r = RHO * r + (1 - RHO) * (BATCH * g).square().mean((0, 2, 3))
        t = SCALE * g / torch.sqrt(r + EPS)[:, None, None]
        pulled = torch.nn.grad.conv2d_weight(x, weight.shape, t, padding=1)
        weight, bias = weight - LR * pulled, bias - LR * t.sum((0, 2, 3))
    torch.testing.assert_close(model.weight, weight, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(model.bias, bias, rtol=1e-10, atol=1e-13)


def loss_of(images: Tensor) -> Tensor:
    return (images.square().mean((1, 2, 3)) + images.sin().mean((1, 2, 3))).mean()
