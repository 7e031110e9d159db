"""As ``virtualgrad bench``, and then the longest kernels of each step in a CUDA graph.

    PROFILE=sgd,svgd-released INTO=profiles/compiled-graphed-vgg-bf16 \
        python results/bench/profile_kernels.py bench --models vgg --modes compiled+graphed

leaves a file for each optimizer named in PROFILE, INTO-sgd.txt and so on (made on an H200, by
torch.profiler: three replays behind the timing, in the same process).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from virtualgrad.lab.bench import measure
from virtualgrad.lab.bench.timing import Step, Timings, interleave
from virtualgrad.lab.entry import main

REPLAYS = 3
LONGEST = int(os.environ.get("LONGEST", "40"))


def interleave_and_profile(steps: Mapping[str, Step], **settings: Any) -> Timings:
    """Time the steps, and then profile those that are CUDA graphs and asked for."""
    timings = interleave(steps, **settings)
    asked = os.environ.get("PROFILE", "").split(",")
    for name, step in steps.items():
        if name in asked and getattr(step, "__name__", "") == "replay":
            Path(f"{os.environ['INTO']}-{name}.txt").write_text(profile(step))
    return timings


def profile(step: Step) -> str:
    """The longest kernels of a step, as a table."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time)
    total, count = sum(map(sum, found.values())), sum(map(len, found.values()))
    lines = [f"kernels of a step: {total / REPLAYS:.1f} us in {count // REPLAYS} launches"]
    for name, times in sorted(found.items(), key=lambda one: -sum(one[1]))[:LONGEST]:
        each = f"{len(times) / REPLAYS:6.1f} x {sum(times) / len(times):9.2f} us"
        lines.append(f"{sum(times) / REPLAYS:9.1f} us/step {each}  {name}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure.interleave = interleave_and_profile
    main()
