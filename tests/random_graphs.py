"""Random programs over random parameters: ops, reuse, tying, views, broadcasting, penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

BATCH, LENGTH, WIDTH = 3, 2, 4
"""All values are (BATCH, LENGTH, WIDTH) or (BATCH, WIDTH); matrices are WIDTH x WIDTH."""

Pick = Callable[[str], Tensor]
"""Gives the next parameter of a kind: "matrix", "vector", "scalar", "table" or "kernel"."""

LINEAR_OPS: dict[str, Callable[[Tensor, Pick], Tensor]] = {
    "linear": lambda x, p: F.linear(x, p("matrix"), p("vector")),
    "linear no bias": lambda x, p: F.linear(x, p("matrix")),
    "matmul": lambda x, p: x @ p("matrix"),
    "matmul transposed": lambda x, p: x @ p("matrix").t(),
    "matmul of a view": lambda x, p: x @ p("matrix").view(2, 2, WIDTH).flatten(0, 1),
    "matmul of pieces": lambda x, p: torch.cat([x @ w.mT for w in p("matrix").chunk(2)], -1),
    "matmul of rows": lambda x, p: x * p("matrix")[1] + x @ p("matrix")[:, :1],
    "matmul of expanded rows": lambda x, p: x * (p("vector").expand(x.shape) @ p("matrix")),
    "linear of expanded rows": lambda x, p: x + F.linear(p("vector").expand(x.shape), p("matrix")),
    "einsum": lambda x, p: torch.einsum("...c,cd->...d", x, p("matrix")),
    "product of weights": lambda x, p: x @ (p("matrix") @ p("matrix")),
    "matrix on a vector": lambda x, p: x * (p("matrix") @ p("vector")),
    "scale": lambda x, p: x * p("vector"),
    "scale by a scalar": lambda x, p: p("scalar") * x,
    "scale, unsqueezed": lambda x, p: x * p("vector").unsqueeze(0),
    "shift": lambda x, p: x + p("vector"),
    "shift by a copy": lambda x, p: x - p("vector").expand(x.shape).contiguous(),
    "shift in place": lambda x, p: (x * 1).add_(p("vector")),
    "scale in place": lambda x, p: (x * 1).mul_(p("vector")),
    "copy scaled in place": lambda x, p: x @ p("matrix").clone().mul_(p("vector")),
    "divide": lambda x, p: x + p("vector") / (2 + x.square()),
    "where": lambda x, p: torch.where(x > 0, x, p("vector")),
    "look up": lambda x, p: x + F.embedding((x.detach().abs().sum(-1) % 3).long(), p("table")),
    "index": lambda x, p: x + p("table")[(x.detach().abs().sum(-1) % 3).long()],
    "layer norm": lambda x, p: F.layer_norm(x, (WIDTH,), p("vector"), p("vector")),
    "rms norm": lambda x, p: F.rms_norm(x, (WIDTH,), p("vector")),
    "convolution": lambda x, p: _convolve(x, p("kernel")),
}

NONLINEAR_OPS: dict[str, Callable[[Tensor, Pick], Tensor]] = {
    "exp": lambda x, p: x * p("vector").exp(),
    "softmax": lambda x, p: x @ torch.softmax(p("matrix"), -1),
    "weight norm": lambda x, p: x @ F.normalize(p("matrix"), dim=0),
    "no parameter": lambda x, p: torch.sin(2 * x),
    "in-place relu": lambda x, p: F.relu(x * 1, inplace=True),
    "residual in place": lambda x, p: (x * 1).add_(torch.tanh(x)),
}

PENALTIES: dict[str, Callable[[Pick], Tensor]] = {
    "l1": lambda p: p("matrix").abs().sum(),
    "l2": lambda p: p("matrix").square().sum() + p("vector").pow(2).sum(),
    "twice in one op": lambda p: (w := p("vector")) @ w,
    "linear": lambda p: p("vector").sum() + (p("matrix") * 0.5).mean(),
}


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    channels = x if x.dim() == 3 else x.unsqueeze(1)
    return F.conv1d(channels.mT, kernel, padding=1).mT.reshape(x.shape)


@dataclass(frozen=True)
class Instruction:
    """One line of a program: value <- op(an earlier value), perhaps plus another one."""

    op: str
    source: int
    added: int | None
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A random model, as data."""

    seed: int
    sequences: bool
    pool: int
    instructions: tuple[Instruction, ...]
    penalties: tuple[tuple[str, tuple[int, ...]], ...]


indices = st.lists(st.integers(0, 7), min_size=2, max_size=2).map(tuple)
programs = st.builds(
    Program,
    seed=st.integers(0, 2**16),
    sequences=st.booleans(),
    pool=st.integers(1, 3),
    instructions=st.lists(
        st.builds(
            Instruction,
            op=st.sampled_from([*LINEAR_OPS, *NONLINEAR_OPS]),
            source=st.integers(0, 7),
            added=st.none() | st.integers(0, 7),
            parameters=indices,
        ),
        min_size=1,
        max_size=8,
    ).map(tuple),
    penalties=st.lists(st.tuples(st.sampled_from(list(PENALTIES)), indices), max_size=2).map(tuple),
)


class RandomModel(nn.Module):
    """Runs a program. A small pool of parameters makes reuse and tying frequent."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        shapes = {
            "matrix": (WIDTH, WIDTH),
            "vector": (WIDTH,),
            "scalar": (),
            "table": (3, WIDTH),
            "kernel": (WIDTH, WIDTH, 3),
        }
        torch.manual_seed(program.seed)
        self.pools = nn.ModuleDict(
            {
                kind: nn.ParameterList(torch.randn(shape) for _ in range(program.pool))
                for kind, shape in shapes.items()
            }
        )

    def _picker(self, numbers: tuple[int, ...]) -> Pick:
        remaining = list(numbers)

        def pick(kind: str) -> Tensor:
            pool = self.pools[kind]
            return pool[(remaining.pop() if remaining else 0) % len(pool)]

        return pick

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        ops = LINEAR_OPS | NONLINEAR_OPS
        for instruction in self.program.instructions:
            source = values[instruction.source % len(values)]
            result = ops[instruction.op](source, self._picker(instruction.parameters))
            if instruction.added is not None:
                result = result + values[instruction.added % len(values)]
            values.append(torch.tanh(result))  # keeps numbers of deep programs in range
        loss = sum((v + 0.1).square().mean() for v in values)
        for name, numbers in self.program.penalties:
            loss = loss + 0.1 * PENALTIES[name](self._picker(numbers))
        return loss

    def inputs(self) -> Tensor:
        return (
            torch.randn(BATCH, LENGTH, WIDTH)
            if self.program.sequences
            else torch.randn(BATCH, WIDTH)
        )
