"""What a layer's node takes the host on a CPU: torch's own, a Function of Python, and one of C++.

    python -m virtualgrad.native
    python results/bench/nodes.py > results/bench/profiles/nodes-cpu.txt

Linear layers of 8 x 8 on four rows, one thread. First the forward call alone, then ``backward()``
by layer of twenty: with SGD, and with nodes of C++ whose T returns g at once, is asked in Python,
or is made in C++, as it is.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.operators import native_transform
from virtualgrad.operators.channels import Incoming
from virtualgrad.virtual.calls import Fused
from virtualgrad.virtual.products import Linear
from virtualgrad.virtual.tracking import Transform

CALLS, STEPS, LAYERS = 10_000, 300, 20


def microseconds(function: Callable[[], Any]) -> float:
    """Of one call, in a loop."""
    for _ in range(1000):
        function()
    begin = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.perf_counter() - begin) / CALLS


def backward(x: Tensor, *, is_sgd: bool) -> float:
    """Microseconds of a backward pass by layer."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    if not is_sgd:
        optimizer = SVGD.released(model, 1e-9, nonfinite="ignore")
    seconds = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(x).sum()
        begin = time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - begin)
        optimizer.step()
    return 1e6 * statistics.median(seconds[STEPS // 4 :]) / LAYERS


def main() -> None:
    """Print all of it."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU; microseconds")
    x, layer = torch.randn(4, 8, requires_grad=True), nn.Linear(8, 8)
    fused = Fused(Linear, (layer.weight, layer.bias))
    in_cpp, python = fused._in_cpp(), fused._by_python()
    assert in_cpp is not None, "build the library first"
    own = microseconds(lambda: torch._C._nn.linear(x, layer.weight, layer.bias))
    ours = [microseconds(lambda run=run: run({}, x)) for run in (python, in_cpp)]  # type: ignore[misc]
    print(f"forward: torch's own {own:.1f}, Python {ours[0]:.1f}, C++ {ours[1]:.1f}")
    rows = x.detach()
    print(f"backward, a layer: SGD {backward(rows, is_sgd=True):.1f}")
    with mock.patch.object(Transform, "for_layer", lambda self, g, *rest: Incoming(g)):
        print(f"backward, a layer: C++, T at once {backward(rows, is_sgd=False):.1f}")
    with mock.patch.object(native_transform, "_to_be_left", lambda *_: None):
        print(f"backward, a layer: C++, T in Python {backward(rows, is_sgd=False):.1f}")
    print(f"backward, a layer: C++ {backward(rows, is_sgd=False):.1f}")


if __name__ == "__main__":
    main()
