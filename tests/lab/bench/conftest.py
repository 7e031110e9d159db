"""A clock that tests turn, and rows whose ratios can be worked out by hand."""

from dataclasses import replace

import pytest
import torch

from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.bench.work import Setup


class FakeClock:
    """Stands still but for the steps that it makes itself."""

    def __init__(self):
        self.now = 0.0
        self.speed = 1.0
        self.log = []

    def __call__(self):
        return self.now

    def step(self, name, seconds):
        def make():
            self.log.append(name)
            self.now += seconds * self.speed

        return make


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def setup():
    return Setup(torch.device("cpu"), bandwidth=1e9, rounds=2, block_seconds=0.001, warm_up=1)


def a_row(optimizer="sgd", ms=2.0, sgd_ms=2.0, **changes):
    row = Row(
        model="mlp",
        mode="eager",
        dtype="fp32",
        optimizer=optimizer,
        batch_size=32,
        parameters=1000,
        ms=ms,
        ms_spread=0.1,
        ratio_to_sgd=ms / sgd_ms,
        ratio_spread=0.02,
        ratio_quartiles=(ms / sgd_ms - 0.01, ms / sgd_ms + 0.01),
        state_bytes=500,
        state_per_parameter=0.5,
        extra_bytes=4000,
        floor_ratio=1.01,
    )
    return replace(row, **changes)


@pytest.fixture
def make_row():
    return a_row


@pytest.fixture
def rows():
    """Two modes; Adam is not installed, so to speak, in one of them."""
    return [
        a_row(),
        a_row("svgd", 3.0),
        a_row("adam", 2.2, floor_ratio=1.3),
        a_row(mode="compiled", ms=1.0, sgd_ms=1.0),
        a_row("svgd", 1.1, 1.0, mode="compiled"),
        Row("mlp", "compiled", "fp32", "adam", 32, 1000, error="OutOfMemoryError: too <big>"),
    ]
