"""Where the host's time goes in an eager step of SVGD: 20 small convolutions, ReLUs, one layer.

    python results/bench/host_profile.py cuda > results/bench/profiles/eager-host-cuda.txt

Tensors are so small that the device has next to nothing to do. First the time of a step and of its
parts (medians of 100), then cProfile's list for 100 steps of ``SVGD.released``; under it Python is
slower than without.
"""

import cProfile
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from virtualgrad import SVGD

CONVOLUTIONS = 20
STEPS = 100


def trainer(kind: str, device: str) -> Callable[[], list[float]]:
    """A function that makes one step; it returns when each of its parts was done."""
    torch.manual_seed(0)
    pairs = [(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU()) for _ in range(CONVOLUTIONS)]
    layers = [layer for pair in pairs for layer in pair]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 10)).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    if kind != "SGD":
        optimizer = SVGD.released(model, 1e-6, share_positions=kind.endswith("shared"))
    x = torch.randn(4, 8, 8, 8, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (4,), device=device)

    def step() -> list[float]:
        times = [time.perf_counter()]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        if device == "cuda":
            torch.cuda.synchronize()
        return times

    for _ in range(20):
        step()
    return step


def main(device: str) -> None:
    """Print the times, and the profile."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device}; microseconds")
    for kind in ("SGD", "SVGD released", "SVGD shared"):
        step = trainer(kind, device)
        times = [step() for _ in range(STEPS)]
        parts = [statistics.median(t[i + 1] - t[i] for t in times) * 1e6 for i in range(3)]
        print(f"{kind}: forward {parts[0]:.0f}, backward {parts[1]:.0f}, step() {parts[2]:.0f}")
    step = trainer("SVGD released", device)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(STEPS):
        step()
    profile.disable()
    listing = io.StringIO()
    pstats.Stats(profile, stream=listing).strip_dirs().sort_stats("tottime").print_stats(30)
    print(listing.getvalue().strip())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
