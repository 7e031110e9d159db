"""SVGD against Algorithm 1 in plain code: one sample at a time, line by line.

The oracle uses nothing of virtualgrad. It runs every sample by itself, takes g = dJ_tau/dsigma by
``torch.autograd.grad``, and pulls T(g) back with the closed forms of a linear layer and of a
convolution. Networks have no batch norm: it would make one sample's loss depend on the others.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD

STEPS, BATCH, LR, SCALE, RHO, EPS = 20, 5, 0.05, 0.3, 0.9, 1e-6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))


def small_conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 4),
    )


def pull_back(layer: nn.Module, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(d sigma / d W)^T t and (d sigma / d b)^T t for one sample."""
    if isinstance(layer, nn.Linear):
        return torch.outer(t[0], x[0]), t[0]
    weight = torch.nn.grad.conv2d_weight(
        x, layer.weight.shape, t, stride=layer.stride, padding=layer.padding
    )
    return weight, t.sum((0, 2, 3))


class AlgorithmOne:
    """Algorithm 1, with the two readings of the released code as switches."""

    def __init__(self, network: nn.Sequential, *, per_sample: bool, stale: bool) -> None:
        self.network = network
        self.per_sample = per_sample
        self.stale = stale
        self.r: dict[nn.Module, Tensor] = {}

    def step(self, xs: Tensor, ys: Tensor) -> None:
        m = len(xs)
        inputs: list[dict[nn.Module, Tensor]] = []
        gradients: list[dict[nn.Module, Tensor]] = []
        for tau in range(m):
            value, layers, sigmas = xs[tau : tau + 1], [], []
            inputs.append({})
            for layer in self.network:
                inputs[tau][layer] = value.detach()
                value = layer(value)
                if isinstance(layer, nn.Linear | nn.Conv2d):
                    layers.append(layer)
                    sigmas.append(value)
            loss = F.cross_entropy(value, ys[tau : tau + 1])
            if not self.per_sample:
                loss = loss / m  # what one sample adds to the batch's mean loss
            gradients.append(dict(zip(layers, torch.autograd.grad(loss, sigmas), strict=True)))
        for layer in gradients[0]:
            old = self.r.get(layer, torch.zeros_like(gradients[0][layer]))
            mean_square = sum(g[layer] ** 2 for g in gradients) / m
            self.r[layer] = RHO * old + (1 - RHO) * mean_square
            r = old if self.stale else self.r[layer]
            pulled = [
                pull_back(layer, x[layer], SCALE * g[layer] / torch.sqrt(r + EPS))
                for x, g in zip(inputs, gradients, strict=True)
            ]
            divisor = m if self.per_sample else 1
            with torch.no_grad():
                layer.weight -= LR * sum(weight for weight, _ in pulled) / divisor
                layer.bias -= LR * sum(bias for _, bias in pulled) / divisor


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize(
    ("network", "shape"), [(mlp, (12,)), (small_conv_net, (2, 6, 6))], ids=["mlp", "conv net"]
)
def test_svgd_is_algorithm_one(
    network: type, shape: tuple[int, ...], per_sample: bool, stale: bool
) -> None:
    torch.manual_seed(0)
    model = network().double()
    reference = AlgorithmOne(copy.deepcopy(model), per_sample=per_sample, stale=stale)
    start = copy.deepcopy(model)
    optimizer = SVGD(model, LR, scale=SCALE, per_sample=per_sample, stale=stale)
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, *shape).double(), torch.randint(0, 4, (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        reference.step(x, y)
    for p, q, begin in zip(
        model.parameters(), reference.network.parameters(), start.parameters(), strict=True
    ):
        assert (p - begin).norm() > 1e-3  # it has moved
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_sum_reduced_loss_gives_the_same_r_and_m_times_the_gradient() -> None:
    torch.manual_seed(0)
    mean_model = mlp().double()
    sum_model = copy.deepcopy(mean_model)
    mean = SVGD(mean_model, LR)
    total = SVGD(sum_model, LR / BATCH, loss_reduction="sum")
    for _ in range(5):
        x, y = torch.randn(BATCH, 12).double(), torch.randint(0, 4, (BATCH,))
        for model, optimizer, reduction in ((mean_model, mean, "mean"), (sum_model, total, "sum")):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()
    for p, q in zip(mean_model.parameters(), sum_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)
    for key, state in mean.operator.state.items():
        torch.testing.assert_close(state["r"], total.operator.state[key]["r"], rtol=1e-10, atol=0)


def test_released_method_is_the_same_method_in_other_units() -> None:
    """Per batch with (s, eps) equals per sample with (m s, m^2 eps), as released-code.md says."""
    torch.manual_seed(0)
    first = small_conv_net().double()
    second = copy.deepcopy(first)
    released = SVGD.released(first, LR, 0.01)
    rescaled = SVGD(
        second, LR, scale=BATCH * 0.01, eps=BATCH**2 * 1e-6, stale=True, where=released_choice
    )
    for _ in range(5):
        x, y = torch.randn(BATCH, 2, 6, 6).double(), torch.randint(0, 4, (BATCH,))
        for model, optimizer in ((first, released), (second, rescaled)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def released_choice(site: object) -> bool:
    return site.op in ("linear", "conv2d") and site.roles == ("weight",)  # type: ignore[attr-defined]


class Task(nn.Module):
    """What is added to all samples is a row of a table; its sigma is (1, features)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(3, 4).double(), nn.Linear(4, 2).double()
        self.sigmas: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sigmas.append(self.table(torch.tensor([1])))
        self.sigmas[-1].retain_grad()
        return torch.tanh(self.linear(x + self.sigmas[-1]))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 1), (4, 1, 1), (1, 4), (1, 1)], ids=str)
def test_a_value_for_the_whole_batch_in_micro_batches_of_one_sample(
    sizes: tuple[int, ...], stale: bool
) -> None:
    """It is no sample's: r goes by the square of the sum, as in larger batches."""
    model = Task()
    optimizer = SVGD(model, 0.01, stale=stale)
    expected = torch.zeros(4, dtype=torch.float64)
    for micro_batches in ((4,), sizes, sizes):
        model.sigmas.clear()
        optimizer.zero_grad()
        for size in micro_batches:
            model(torch.randn(size, 4).double()).square().mean().backward()
        gradients = [sigma.grad for sigma in model.sigmas]
        expected = 0.9 * expected + 0.1 * sum(g[0] for g in gradients if g is not None).square()  # type: ignore[union-attr]
        optimizer.step()
        (r,) = [tensors["r"] for key, tensors in optimizer.operator.state.items() if "table" in key]  # type: ignore[attr-defined]
        torch.testing.assert_close(r, expected, rtol=1e-12, atol=1e-20)
