"""What torch.compile checks before each call of a model, with SGD and with SVGD, and how long.

    python results/bench/count_guards.py > results/bench/profiles/guards-cpu.txt

Convolution, batch norm and ReLU, 2 and 12 times; the difference over ten is what a layer adds.
Counted are the guards of the tree that is walked: one that several lines of code ask for stands in
it once. Timed is a walk by itself, again and again; in a step, where other work has used the caches
in between, it takes longer.
"""

import re
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from virtualgrad import SVGD

FEW, MANY = 2, 12
WALKS = 5000


class Guards(NamedTuple):
    """How many, and microseconds of a walk."""

    number: float
    time: float


class Network(nn.Module):
    """Layers, one after the other; a class of our own, whose forward is what is compiled."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        kinds = (lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.BatchNorm2d(4), nn.ReLU)
        self.layers = nn.ModuleList(kind() for _ in range(layers) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for layer in self.layers:
            x = layer(x)
        return x


def guards_of(layers: int, *, is_svgd: bool) -> Guards:
    """The guards of a compiled model."""
    torch._dynamo.reset()
    model = Network(layers)
    optimizer = SVGD.released(model, 1e-6) if is_svgd else torch.optim.SGD(model.parameters(), 1e-6)
    x = torch.randn(4, 4, 6, 6)
    torch.compile(model, fullgraph=True)(x).mean().backward()
    optimizer.zero_grad()
    forward: Any = type(model).forward
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(forward.__code__)
    cells = forward.__closure__ or ()
    local = dict(
        zip(forward.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )
    local |= {"self": model, "x": x, "args": (x,), "kwargs": {}}
    guards = entry.guard_manager
    assert guards.check(local)
    times = []
    for _ in range(WALKS):
        begin = time.perf_counter()
        guards.check(local)
        times.append(time.perf_counter() - begin)
    leaves = re.findall(r"\+- [A-Z_]{3,}", str(guards))
    return Guards(len(leaves), statistics.median(times) * 1e6)


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    for name, is_svgd in (("SGD", False), ("SVGD released", True)):
        few, many = (guards_of(layers, is_svgd=is_svgd) for layers in (FEW, MANY))
        number, taken = ((b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True))
        print(
            f"{name}: {few.number} guards of {FEW} layers, {few.time:.1f} us; {many.number} of "
            f"{MANY}, {many.time:.1f} us; a layer {number:g}, {taken:.1f} us"
        )
