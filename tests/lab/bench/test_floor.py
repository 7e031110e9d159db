"""Bytes and operations against a count by hand."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import every_linear_site, weights_only
from virtualgrad.lab.bench import floor
from virtualgrad.lab.bench.floor import (
    Counts,
    copy_bandwidth,
    floor_ratio,
    step_flops,
    svgd_bytes,
)
from virtualgrad.lab.bench.methods import METHODS, Statistics
from virtualgrad.lab.bench.modes import PRECISIONS
from virtualgrad.lab.bench.networks import Network, cross_entropy
from virtualgrad.lab.bench.peers import PEERS

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]


def network_of(build, *shape):
    def inputs(batch_size):
        return torch.randn(batch_size, *shape), torch.zeros(batch_size, dtype=torch.long)

    return Network("one", "One layer", build, inputs, 4, cross_entropy)


LINEAR = network_of(partial(nn.Linear, 3, 5), 3)


class Convolution(nn.Conv2d):
    """2 x 7 x 5 x 5 from 3 x 7 x 7."""

    def __init__(self):
        super().__init__(3, 7, 3)

    def forward(self, x):
        return super().forward(x).flatten(1)


class Rows(nn.Linear):
    """(4, 6, 5), of which the mean over positions is the output."""

    def __init__(self):
        super().__init__(3, 5)

    def forward(self, x):
        return super().forward(x).mean(1)


class Scale(nn.Module):
    """A parameter that multiplies elementwise."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    ("network", "shared", "precision", "expected"),
    [
        # sigma is 4 x 5: read g and r, write r; T scales the rows of the weight gradient
        (LINEAR, False, FP32, 4 * 5 * 4 + 2 * 5 * 4),
        (LINEAR, False, BF16, 4 * 5 * 2 + 2 * 5 * 4),
        # sigma is 4 x 7 x 5 x 5, r is 7 x 5 x 5: T(g) is written, too
        (network_of(Convolution, 3, 7, 7), False, FP32, 2 * 4 * 175 * 4 + 2 * 175 * 4),
        (network_of(Convolution, 3, 7, 7), False, BF16, 2 * 4 * 175 * 2 + 2 * 175 * 4),
        (network_of(Convolution, 3, 7, 7), True, FP32, 4 * 175 * 4 + 2 * 7 * 4),
        (network_of(Rows, 6, 3), False, FP32, 2 * 4 * 30 * 4 + 2 * 30 * 4),
        (network_of(Rows, 6, 3), True, FP32, 4 * 30 * 4 + 2 * 5 * 4),
    ],
)
def test_bytes_of_one_layer(network, shared, precision, expected):
    assert svgd_bytes(network, Statistics(weights_only, shared), precision) == expected
    assert svgd_bytes(network, Statistics(every_linear_site, shared), precision) == expected


def test_an_elementwise_parameter_needs_no_copy_of_g():
    network = network_of(Scale, 3)
    assert svgd_bytes(network, Statistics(every_linear_site), FP32) == 4 * 3 * 4 + 2 * 3 * 4
    assert svgd_bytes(network, Statistics(every_linear_site), BF16) == 4 * 3 * 4 + 2 * 3 * 4
    assert svgd_bytes(network, Statistics(weights_only), FP32) == 0


def test_operations_of_one_layer():
    # forward and weight gradient: 2 x 4 x 3 x 5 each; the input needs none
    assert step_flops(LINEAR) == 2 * (2 * 4 * 3 * 5)


def test_counts_of_the_optimizers():
    counts = Counts(LINEAR, FP32)
    assert counts.parameters == 20 and counts.flops == 240
    assert counts.extra_bytes(METHODS["sgd"], 0) == 0
    assert counts.extra_bytes(METHODS["adam"], 160) == 320  # once in, once out
    assert counts.extra_bytes(METHODS["adam"], None) is None
    assert counts.extra_bytes(METHODS["svgd"], 20) == 4 * 5 * 4 + 2 * 5 * 4
    assert counts.extra_bytes(PEERS["opacus"], 160) is None


class NeedsNumbers(nn.Linear):
    """Looks at its input, which a count on paper does not have."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() else F.relu(x)


def test_what_cannot_be_counted_is_left_open():
    counts = Counts(network_of(partial(NeedsNumbers, 3, 5), 3), FP32)
    assert counts.flops is None and counts.parameters == 20
    assert counts.extra_bytes(METHODS["svgd"], 20) is None


def test_the_floor_as_a_ratio():
    # 1e9 bytes at 4e12 bytes/s take 0.25 ms, on top of 1 ms
    assert floor_ratio(10**9, bandwidth=4e12, sgd_seconds=1e-3) == 1.25
    assert floor_ratio(0, bandwidth=4e12, sgd_seconds=1e-3) == 1.0


def test_bandwidth_is_that_of_the_fastest_copy(monkeypatch):
    """Copies of 3, 0.5 and 1 seconds: 1,000 bytes read and as many written in half a second."""
    clock = iter([0.0, 3.0, 3.0, 3.5, 4.0, 5.0])
    monkeypatch.setattr(floor, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(floor, "COPIED_BYTES", {"cpu": 1000})
    assert copy_bandwidth(torch.device("cpu"), repeats=3) == 4000.0
