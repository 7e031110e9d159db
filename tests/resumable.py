"""A user's training loop with checkpoints, killed with SIGKILL again and again.

Run as a program it does so in processes that it forks: torch is imported once, so that a start
takes milliseconds. It prints the steps of the checkpoints that the kills left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in every process anew
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from virtualgrad import SVGD, Checkpoints

STEPS, BETWEEN_CHECKPOINTS = 120, 2
READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "released": {"per_sample": False, "stale": True, "eps": 1e-3},
}


def train(folder: Path, reading: str, end: Path, tell: Callable[[], object]) -> None:
    """Train to the last step, from wherever it was; dropout and order of samples are random."""
    torch.manual_seed(0)
    images = torch.randn(60, 1, 6, 6)
    samples = TensorDataset(images, images.mean((1, 2, 3)).gt(0).long())
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 2)
    )
    optimizer = SVGD(model, 0.05, scale=0.1, momentum=0.9, **READINGS[reading])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    shuffle = torch.Generator().manual_seed(1)
    loader = DataLoader(samples, batch_size=8, shuffle=True, generator=shuffle)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    step = position = 0
    checkpoints = Checkpoints(folder)
    latest = checkpoints.load()
    if latest is not None:
        step, position = latest.step, latest.state["position"]
        for name, part in parts.items():
            part.load_state_dict(latest.state[name])
        shuffle.set_state(latest.state["shuffle"])
        torch.set_rng_state(latest.state["rng"])
    tell()
    while step < STEPS:
        begun = shuffle.get_state()  # of this epoch
        for number, (x, y) in enumerate(loader):
            if number < position or step == STEPS:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            tell()
            if step % BETWEEN_CHECKPOINTS == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                place = {"position": number + 1, "shuffle": begun, "rng": torch.get_rng_state()}
                checkpoints.save(step, state | place)
        position = 0
    torch.save({name: part.state_dict() for name, part in parts.items()}, end)


def started(*arguments: Any) -> tuple[int, int]:
    """Fork a process that trains; its id, and a pipe that tells of its start and of every step."""
    begun, told = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(*arguments, lambda: os.write(told, b"."))
            status = 0
        finally:
            os._exit(status)
    os.close(told)
    return child, begun


def ended(child: int, begun: int) -> int:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(begun)
    return status


def kill_often(out: Path, reading: str, kills: int, moments: random.Random) -> list[int]:
    """Train once undisturbed, then under kills to the end; steps of what the kills left."""
    before = time.perf_counter()
    assert ended(*started(out / "whole", reading, out / "whole.pt")) == 0
    seconds_per_step = (time.perf_counter() - before) / STEPS
    folder, end, left = out / "killed", out / "killed.pt", []
    while len(left) < kills:
        child, begun = started(folder, reading, end)
        for _ in range(moments.randrange(9)):  # with none, it is killed while it loads
            os.read(begun, 1)
        time.sleep(moments.uniform(0, seconds_per_step))
        os.kill(child, signal.SIGKILL)  # nobody has waited for it: the number is still its own
        if ended(child, begun) == -signal.SIGKILL:
            latest = Checkpoints(folder).load()
            left.append(0 if latest is None else latest.step)
        else:  # it was faster: once more from the start
            folder = out / f"killed after {len(left)}"
    assert ended(*started(folder, reading, end)) == 0
    return left


if __name__ == "__main__":
    torch.set_num_threads(1)
    target, count = Path(sys.argv[1]), int(sys.argv[2])
    places = {}
    for number, name in enumerate(READINGS):
        (target / name).mkdir()
        places[name] = kill_often(target / name, name, count, random.Random(number))
    print(json.dumps(places))
