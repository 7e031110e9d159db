"""How many guards torch.compile checks before each call of a model, with SGD and with SVGD.

    python results/bench/count_guards.py > results/bench/profiles/guards-cpu.txt

Convolution, batch norm and ReLU, 2 and 12 times; the difference over ten is what a layer adds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from virtualgrad import SVGD

FEW, MANY = 2, 12


def guards_of(layers: int, *, is_svgd: bool) -> int:
    """The number of guards of a compiled model."""
    torch._dynamo.reset()
    triples = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*[layer for triple in triples for layer in triple])
    if is_svgd:
        optimizer = SVGD.released(model, 1e-6)
    counts: list[int] = []

    def count(guards: Sequence[Any]) -> list[bool]:
        counts.append(len(guards))
        return [True] * len(guards)

    options: Any = {"guard_filter_fn": count}
    torch.compile(model, fullgraph=True, options=options)(torch.randn(4, 4, 6, 6)).mean().backward()
    if is_svgd:
        optimizer.detach()
    (found,) = counts
    return found


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    for name, is_svgd in (("SGD", False), ("SVGD released", True)):
        few, many = (guards_of(layers, is_svgd=is_svgd) for layers in (FEW, MANY))
        each = (many - few) / (MANY - FEW)
        print(f"{name}: {few} guards of {FEW} layers, {many} of {MANY}; {each:g} a layer")
