r"""The floor: what an optimizer must at least cost beyond SGD, counted and not measured.

SVGD makes no further matrix products. What it must do is move memory, at every site where T acts:

    read g                          to take the statistic of it
    write T(g)                      only if r differs between the positions of a convolution or of
                                    the rows of a product; otherwise T scales the rows of the weight
                                    gradient, and where a parameter multiplies or adds elementwise,
                                    T fits into the sum that is its gradient
    read r, write r                 4 bytes each, whatever the number format

A plain optimizer must read and write its state. With bandwidth B and SGD's time t per step,

    floor = 1 + bytes / (B t)

The count takes g as read from memory once more than SGD reads it. A kernel that takes the statistic
where g is made would save that, and on a small network g may still lie in the cache: there a ratio
below the floor is possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from virtualgrad import Site, explain
from virtualgrad.lab.bench.methods import Method, Statistics
from virtualgrad.lab.bench.modes import Precision
from virtualgrad.lab.bench.networks import Network
from virtualgrad.sites.site import CONVOLUTION_OPS, MATMUL_OPS

R_BYTES = 4
PRODUCTS = MATMUL_OPS | CONVOLUTION_OPS
LOW_PRECISION = PRODUCTS | {"batch_norm"}
"""Ops whose sigma, and so whose g, is bfloat16 under autocast; batch norm follows its input."""

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


@dataclass(frozen=True)
class Traffic:
    """Bytes that T must move at a site in a step.

    Attributes:
        read: Bytes to read.
        written: Bytes to write.
    """

    read: int
    written: int

    @property
    def moved(self) -> int:
        """Both together."""
        return self.read + self.written


def site_traffic(site: Site, *, share_positions: bool, autocast: bool) -> Traffic:
    """What T moves at one site."""
    bytes_per_number = 2 if autocast and site.op in LOW_PRECISION else 4
    g = prod(site.shape) * bytes_per_number
    r = site.state_elements(share_positions) * R_BYTES
    return Traffic(read=g + r, written=r + (g if _needs_copy(site, share_positions) else 0))


def _needs_copy(site: Site, share_positions: bool) -> bool:
    """Whether the product that makes the weight gradient needs T(g) in memory."""
    if site.op not in PRODUCTS:
        return False
    layout = site.layout
    kept = set(range(len(layout.view))) - layout.parameter_axes
    kept -= set(layout.averaged_axes(share_positions))
    return any(layout.view[axis] > 1 for axis in kept)


def svgd_bytes(network: Network, statistics: Statistics, precision: Precision) -> int:
    """What an SVGD must move beyond SGD in a step; nothing is computed to find out."""
    shared, autocast = statistics.share_positions, precision.autocast
    return sum(
        site_traffic(site, share_positions=shared, autocast=autocast).moved
        for site in _transformed(network, statistics)
    )


@lru_cache(maxsize=64)  # the same for every mode and number format, and seconds for GPT-2
def _transformed(network: Network, statistics: Statistics) -> tuple[Site, ...]:
    """The sites on which T acts."""
    model, (x, _) = _on_paper(network)
    return explain(model, x, where=statistics.where).transformed


@lru_cache(maxsize=64)
def step_flops(network: Network) -> int:
    """Floating-point operations of the products of forward and backward; 2 per multiply-add."""
    model, (x, y) = _on_paper(network)
    with FlopCounterMode(display=False) as counter:
        network.loss(model(x), y).backward()
    return int(counter.get_total_flops())


def _on_paper(network: Network) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The network and its batch as shapes alone, without numbers."""
    with torch.device("meta"):
        return network.build(), network.inputs(network.batch_size)


class Counts:
    """What is counted of a network for its rows.

    A network that cannot be counted is measured all the same, with None for what is missing.

    Attributes:
        parameters: How many numbers the parameters hold.
        flops: Of forward and backward.
    """

    def __init__(self, network: Network, precision: Precision) -> None:
        self.parameters = sum(p.numel() for p in _on_paper(network)[0].parameters())
        self.flops = _or_none(partial(step_flops, network))
        self._network, self._precision = network, precision

    def extra_bytes(self, method: Method, state_bytes: int | None) -> int | None:
        """What an optimizer must move beyond SGD: for T, or its state once in and once out."""
        if method.statistics is not None:
            return _or_none(partial(svgd_bytes, self._network, method.statistics, self._precision))
        return None if state_bytes is None or method.foreign else 2 * state_bytes


def _or_none(count: Callable[[], int]) -> int | None:
    try:
        return count()
    except Exception:
        return None


def floor_ratio(extra_bytes: int, *, bandwidth: float, sgd_seconds: float) -> float:
    """The least ratio to SGD: 1 + bytes / (bandwidth * time of SGD's step)."""
    return 1 + extra_bytes / bandwidth / sgd_seconds


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Bytes per second, read and written, of the best of some large copies on a device."""
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        _finish(device)
        begin = time.perf_counter()
        target.copy_(source)
        _finish(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * source.numel() / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":  # pragma: no cover - needs a GPU
        torch.cuda.synchronize(device)
