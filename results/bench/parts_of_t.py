"""What T takes the host in the middle of an eager backward pass, part by part, on a GPU.

    python -m virtualgrad.native
    python results/bench/parts_of_t.py > results/bench/profiles/parts-of-t-cuda.txt

Small batches, so that the device has little to do; ``SVGD.released`` without the look for NaN. For
each network and format: milliseconds of ``backward()``, SGD's and ours; then, for each function on
the way from a layer's node to its kernel, calls a step and microseconds of one, what it calls
included. Each is timed in a run of its own.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD
from virtualgrad.lab.bench.modern import ViT
from virtualgrad.lab.networks import MLP, ResNet20
from virtualgrad.operators import kernels, kernels_of_weights, launches, rms
from virtualgrad.virtual import tracking

STEPS, WARM_UP = 20, 10
NETWORKS: dict[type[nn.Module], tuple[int, ...]] = {
    ResNet20: (16, 3, 32, 32),
    ViT: (4, 3, 224, 224),
    MLP: (32, 1, 28, 28),
}
PARTS: dict[str, tuple[Any, str]] = {
    "Transform.for_layer": (tracking.Transform, "for_layer"),
    "RMS.for_layer": (rms.RMS, "for_layer"),
    "transform_fused": (rms, "transform_fused"),
    "Fused": (kernels.Fused, "__call__"),
    "WeightGradient": (kernels_of_weights.WeightGradient, "__call__"),
    "Launch": (launches.Launch, "__call__"),
}


def trainer(network: type[nn.Module], *, autocast: bool, is_sgd: bool) -> Callable[[], float]:
    """A function that makes one step; it returns the seconds of its backward pass."""
    torch.manual_seed(0)
    layout = torch.contiguous_format if network is MLP else torch.channels_last
    shape = NETWORKS[network]
    model = network().cuda().to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(shape, device="cuda").to(memory_format=layout)
    y = torch.randint(10, shape[:1], device="cuda")
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    if not is_sgd:
        optimizer = SVGD.released(model, 1e-6, nonfinite="ignore")

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        return end - begin

    for _ in range(WARM_UP):
        step()
    return step


def timed(owner: Any, name: str, step: Callable[[], float]) -> list[float]:
    """The seconds of each call of a function, in some steps."""
    function, seconds = getattr(owner, name), []

    def noted(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(owner, name, noted)
    try:
        for _ in range(STEPS):
            step()
    finally:
        setattr(owner, name, function)
    return seconds


def main() -> None:
    """Print all of it."""
    torch.backends.cudnn.benchmark = True
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for network in NETWORKS:
        for autocast in (False, True):
            sgd = trainer(network, autocast=autocast, is_sgd=True)
            ours = trainer(network, autocast=autocast, is_sgd=False)
            backward = [1e3 * statistics.median(run() for _ in range(30)) for run in (sgd, ours)]
            title = f"{network.__name__}, {'bf16' if autocast else 'fp32'}"
            print(f"{title}: backward() {backward[0]:.2f} ms with SGD, {backward[1]:.2f} with SVGD")
            for part, (owner, name) in PARTS.items():
                seconds = timed(owner, name, ours)
                if seconds:
                    each = 1e6 * sum(seconds) / len(seconds)
                    print(f"  {part}: {len(seconds) / STEPS:.0f} calls, {each:.1f} us")


if __name__ == "__main__":
    main()
