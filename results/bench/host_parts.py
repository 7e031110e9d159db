"""Where the host's time goes in an eager step: zero_grad, forward, backward and step().

    python -m virtualgrad.native
    python results/bench/host_parts.py > results/bench/profiles/host-parts-cuda.txt

Batches so small that the device waits for the host; bfloat16 autocast, channels-last images, layers
in C++ where they are built. SGD and readings of SVGD in turns, five steps each, twelve rounds:
medians in milliseconds, and the ratio of whole steps. Last, how often T was asked in Python.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer

from virtualgrad import SVGD, native
from virtualgrad.lab.bench.modern import ResNet50, ViT
from virtualgrad.lab.networks import MLP, VGG, ResNet20
from virtualgrad.virtual.tracking import Transform

ROUNDS, STEPS, WARM_UP = 12, 5, 8
NETWORKS: dict[type[nn.Module], tuple[int, ...]] = {
    MLP: (32, 1, 28, 28),
    VGG: (16, 3, 32, 32),
    ResNet20: (16, 3, 32, 32),
    ResNet50: (4, 3, 224, 224),
    ViT: (4, 3, 224, 224),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), 1e-6),
    "released": lambda model: SVGD.released(model, 1e-6),
    "released, NaN ignored": lambda model: SVGD.released(model, 1e-6, nonfinite="ignore"),
    "Algorithm 1": lambda model: SVGD(model, 1e-6),
}
Step = Callable[[], list[float]]


def prepared(network: type[nn.Module], shape: tuple[int, ...], optimizer: str) -> Step:
    """A step of a network that is warmed up; the milliseconds of its four parts."""
    torch.manual_seed(0)
    model = network().cuda().to(memory_format=torch.channels_last)
    chosen = OPTIMIZERS[optimizer](model)
    x = torch.randn(shape, device="cuda").to(memory_format=torch.channels_last)
    classes = torch.zeros(shape[0], dtype=torch.long, device="cuda")

    def step() -> list[float]:
        times = [time.perf_counter()]
        chosen.zero_grad()
        times.append(time.perf_counter())
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), classes)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        chosen.step()
        times.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(times)]

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return step


def main() -> None:
    """Print all of it."""
    asked: list[str] = []

    def noting(method: Any) -> Any:
        return lambda self, *args, **options: (
            asked.append(self.site.key) or method(self, *args, **options)  # type: ignore[func-returns-value]
        )

    for name in ("for_layer", "norm_gradients"):
        setattr(Transform, name, noting(getattr(Transform, name)))
    begin = time.perf_counter()
    for _ in range(20):
        sum(range(100_000))
    loop = 1e3 * (time.perf_counter() - begin) / 20
    built = "built" if native.built() is not None else "not built"
    device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}; C++ {built}; sum(range(100_000)): {loop:.2f} ms")
    for network, shape in NETWORKS.items():
        steps = {name: prepared(network, shape, name) for name in OPTIMIZERS}
        found: dict[str, list[list[float]]] = {name: [] for name in OPTIMIZERS}
        asked.clear()
        for _ in range(ROUNDS):
            for name, step in steps.items():
                some = [step() for _ in range(STEPS)]
                torch.cuda.synchronize()
                found[name].append([statistics.median(part) for part in zip(*some, strict=True)])
        for name, rounds in found.items():
            zero, forward, backward, update = (
                statistics.median(part) for part in zip(*rounds, strict=True)
            )
            pairs = zip(rounds, found["SGD"], strict=True)
            ratio = statistics.median(sum(ours) / sum(theirs) for ours, theirs in pairs)
            print(
                f"{network.__name__}, {name}: zero_grad {zero:.2f}, forward {forward:.2f}, "
                f"backward {backward:.2f}, step {update:.2f}; {ratio:.2f} x SGD"
            )
        where = f", at {', '.join(sorted(set(asked)))}" if asked else ""
        print(f"  T asked in Python: {len(asked)} times{where}")


if __name__ == "__main__":
    main()
