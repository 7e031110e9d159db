"""Where a step's time goes on a CPU: zero_grad, forward, backward and step(), SVGD beside SGD.

    python results/bench/step_parts.py > results/bench/profiles/step-parts-cpu.txt

First ten convolutions with norm and ReLU on tiny images, eagerly, in microseconds a layer; then the
paper's MLP, eagerly and compiled, in microseconds. Layers are in C++ where they are built. All take
turns, in blocks of steps; medians of all but the first of each. With PYTHONPATH at the src of
another commit, that one is measured. "No T" has the interception alone.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD, native
from virtualgrad.lab.networks import MLP

LAYERS, ROUNDS, BLOCK, WARM_UP = 10, 6, 60, 20
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 1e-9),
    "SVGD released": lambda model: SVGD.released(model, 1e-9),
    "SVGD released, NaN ignored": lambda model: SVGD.released(model, 1e-9, nonfinite="ignore"),
    "SVGD": lambda model: SVGD(model, 1e-9),
    "no T, NaN ignored": lambda model: SVGD(
        model, 1e-9, where=lambda site: False, nonfinite="ignore"
    ),
}


def parts_of_step(run: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[float]:
    """The seconds that each part of one step takes, and all of it."""
    target = torch.arange(len(x)) % 10
    times = [time.perf_counter()]
    optimizer.zero_grad()
    times.append(time.perf_counter())
    loss = F.cross_entropy(run(x).flatten(1), target)
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    times.append(time.perf_counter())
    parts = [end - begin for begin, end in itertools.pairwise(times)]
    return [*parts, times[-1] - times[0]]


def measure(build: Callable[[], nn.Module], x: Tensor, *, compiled: bool, layers: int) -> None:
    """Print a line for each optimizer, microseconds by layer."""
    made: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for name, optimizer in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = build()
        run: nn.Module = torch.compile(model, fullgraph=True) if compiled else model  # type: ignore[assignment]
        made[name] = (run, optimizer(model))
    times: dict[str, list[list[float]]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, (run, chosen) in made.items():
            block = [parts_of_step(run, chosen, x) for _ in range(WARM_UP + BLOCK)]
            times[name] += block[WARM_UP:]
    sgd = statistics.median(step[-1] for step in times["SGD"])
    for name, steps in times.items():
        medians = [statistics.median(part) for part in zip(*steps, strict=True)]
        figures = ", ".join(f"{1e6 * median / layers:.1f}" for median in medians)
        print(f"{name}: {figures}; {medians[-1] / sgd:.2f} x SGD")


def small_images() -> nn.Module:
    """Convolutions with norm and ReLU."""
    kinds = (lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), lambda: nn.BatchNorm2d(8), nn.ReLU)
    return nn.Sequential(*(kind() for _ in range(LAYERS) for kind in kinds))


if __name__ == "__main__":
    built = "built" if native.built() is not None else "not built"
    print(f"torch {torch.__version__}, C++ {built}; zero_grad, forward, backward, step(), all")
    torch.set_num_threads(1)
    print("eager, a layer of convolution, norm and ReLU")
    measure(small_images, torch.randn(4, 8, 8, 8), compiled=False, layers=LAYERS)
    torch.set_num_threads(2)
    print("MLP, eager")
    measure(MLP, torch.randn(32, 1, 28, 28), compiled=False, layers=1)
    print("MLP, compiled")
    measure(MLP, torch.randn(32, 1, 28, 28), compiled=True, layers=1)
