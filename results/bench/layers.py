"""What a layer takes the host on a CPU, forward and backward: SGD, SVGD in Python, and in C++.

    python -m virtualgrad.native
    python results/bench/layers.py > results/bench/profiles/layers-cpu.txt

Twenty layers of a kind in an nn.Sequential, on four rows of eight numbers, one thread; medians of
passes, the least of three turns, in microseconds by layer. Then an op under torch function modes:
none, one that only calls the op, and ours.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode

from virtualgrad import SVGD, native

LAYERS, PASSES, TURNS, CALLS = 20, 200, 3, 20_000
KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "layer norm": lambda: nn.LayerNorm(8),
    "ReLU": nn.ReLU,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), 1e-9),
    "released": lambda model: SVGD.released(model, 1e-9, nonfinite="ignore"),
    "Algorithm 1": lambda model: SVGD(model, 1e-9, nonfinite="ignore"),
}


class Trivial(TorchFunctionMode):
    """A mode that calls the op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op."""
        return func(*args, **(kwargs or {}))


def passes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> tuple[float, float]:
    """Microseconds by layer of a forward and of a backward pass."""
    forward, backward = [], []
    for _ in range(PASSES):
        optimizer.zero_grad()
        begin = time.perf_counter()
        sigma = model(x)
        forward.append(time.perf_counter() - begin)
        loss = sigma.sum()
        begin = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - begin)
        optimizer.step()
    medians = [statistics.median(times[PASSES // 4 :]) for times in (forward, backward)]
    return 1e6 * medians[0] / LAYERS, 1e6 * medians[1] / LAYERS


def microseconds(function: Callable[[], Any]) -> float:
    """Of one call, in a loop; the least of some turns."""
    found = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            function()
        found.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return min(found)


def main() -> None:
    """Print all of it."""
    torch.set_num_threads(1)
    assert native.built() is not None, "build the library first"
    print(f"torch {torch.__version__}, CPU; microseconds by layer")
    x = torch.randn(4, 8)
    for kind, build in KINDS.items():
        runs: dict[str, tuple[nn.Module, Optimizer]] = {}
        for name, optimize in OPTIMIZERS.items():
            for in_cpp in (False, True) if name != "SGD" else (False,):
                model = nn.Sequential(nn.Linear(8, 8), *(build() for _ in range(LAYERS)))
                label = f"{name}, {'C++' if in_cpp else 'Python'}" if name != "SGD" else name
                native.use(in_cpp)
                runs[label] = model, optimize(model)
                passes(*runs[label], x)
        found: dict[str, list[tuple[float, float]]] = {label: [] for label in runs}
        for _ in range(TURNS):
            for label, run in runs.items():
                found[label].append(passes(*run, x))
        for label, times in found.items():
            forward, backward = (min(each) for each in zip(*times, strict=True))
            print(f"{kind}, {label}: forward {forward:.1f}, backward {backward:.1f}")
    optimizer = SVGD.released(nn.Linear(8, 8), 1e-9)
    add = microseconds(lambda: x.add(x))
    with Trivial():
        trivial = microseconds(lambda: x.add(x))
    with optimizer._attached().intercept:
        ours = microseconds(lambda: x.add(x))
    print(f"an op: {add:.1f}; under a trivial mode {trivial:.1f}, under ours {ours:.1f}")


if __name__ == "__main__":
    main()
