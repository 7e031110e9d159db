"""How long the first compiled step takes, with SGD and with SVGD, on a CPU.

    python results/bench/compile_time.py > results/bench/profiles/compile-time-cpu.txt

The paper's networks; tracing alone (``aot_eager``), which is the part that Python's speed decides,
the median of three, and with Inductor, its caches empty, once. One thread; with PYTHONPATH at the
src of another commit, that one is measured.
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD
from virtualgrad.lab.networks import MLP, VGG, ResNet20

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (MLP, (1, 28, 28)),
    "VGG": (VGG, (3, 32, 32)),
    "ResNet-20": (ResNet20, (3, 32, 32)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 1e-9),
    "SVGD released": lambda model: SVGD.released(model, 1e-9),
    "SVGD": lambda model: SVGD(model, 1e-9),
}


def first_step(network: str, name: str, how: str) -> float:
    """Seconds of the first step, from nothing compiled."""
    build, shape = NETWORKS[network]
    torch._dynamo.reset()
    gc.collect()
    model = build()
    optimizer = OPTIMIZERS[name](model)
    run: nn.Module = torch.compile(model, backend=how, fullgraph=True)  # type: ignore[assignment]
    x = torch.randn(4, *shape)
    begin = time.perf_counter()
    F.cross_entropy(run(x), torch.zeros(4, dtype=torch.long)).backward()
    optimizer.step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True
    print(f"torch {torch.__version__}; seconds of the first step")
    for how, times in (("aot_eager", 3), ("inductor", 1)):
        for network in NETWORKS:
            first_step(network, "SGD", how)  # imports, and the C++ compiler's headers
            found = {
                name: statistics.median(first_step(network, name, how) for _ in range(times))
                for name in OPTIMIZERS
            }
            line = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.items())
            print(f"{how}, {network}: {line}", flush=True)
