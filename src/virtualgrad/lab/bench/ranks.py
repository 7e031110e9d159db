"""What it costs to share SVGD's statistics between processes that share a batch (ranks).

Every rank trains its own copy of a network under DistributedDataParallel, on a batch of its own,
on one CPU thread. Five optimizers take turns on it: SGD, and SVGD with the r of before the step or
updated first, each of them once as it is and once with ``process_group=None``, where every rank
keeps its statistics to itself. The reduction is all that the last two differ by, so the ratio of
their times, round by round, is what it costs.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgrad import SVGD
from virtualgrad.lab.bench.methods import LR, REFERENCE
from virtualgrad.lab.bench.networks import NETWORKS, TINY, Network, tiny
from virtualgrad.lab.bench.ranks_table import RankRow, save_ranks, summary
from virtualgrad.lab.bench.timing import Step, Timings, interleave

WARM_UP = 3
PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the others."""


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), LR)


def _svgd(model: nn.Module, **options: Any) -> Optimizer:
    return SVGD.released(model, LR, **options)


@dataclass(frozen=True)
class Variant:
    """An optimizer to compare.

    Attributes:
        make: The optimizer of a DDP model.
        alone: Name of the variant that differs by the reduction only.
    """

    make: Callable[[nn.Module], Optimizer]
    alone: str | None = None


VARIANTS = {
    REFERENCE: Variant(_sgd),
    "released": Variant(_svgd, alone="released-alone"),
    "released-alone": Variant(partial(_svgd, process_group=None)),
    "updated-first": Variant(partial(_svgd, stale=False), alone="updated-first-alone"),
    "updated-first-alone": Variant(partial(_svgd, stale=False, process_group=None)),
}
"""In the order in which they take turns."""


class Collectives(TorchDispatchMode):
    """Counts what is reduced over all ranks while it is on, DDP's gradients among it.

    Attributes:
        calls: How many reductions.
        bytes: How much each rank sends into them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and take note if it is a reduction."""
        if func is torch.ops.c10d.allreduce_.default:
            self.calls += 1
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in args[0])
        return func(*args, **(kwargs or {}))


def common_clock() -> float:
    """Seconds, the same number on all ranks, when all of them have come here.

    So all ranks put equally many steps into a block, as they must: each step waits for the others.
    """
    distributed.barrier()
    now = torch.tensor([time.perf_counter()], dtype=torch.float64)
    distributed.broadcast(now, 0)
    return now.item()


def make_step(network: Network, variant: Variant) -> Step:
    """A training step of a variant on this rank; weights are the same on all, batches are not."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(network.build())
    optimizer = variant.make(ddp)
    torch.manual_seed(1 + distributed.get_rank())
    x, y = network.inputs(network.batch_size)

    def step() -> None:
        optimizer.zero_grad()
        network.loss(ddp(x), y).backward()
        optimizer.step()

    return step


def measure_here(network: Network, *, rounds: int, seconds: float) -> list[RankRow]:
    """Measure all variants, on every rank of the default process group at the same time."""
    steps = {name: make_step(network, variant) for name, variant in VARIANTS.items()}
    reduced = {}
    for name, step in steps.items():
        for _ in range(WARM_UP):  # before it is counted: ranks agree on their sites at first
            step()
        with Collectives() as reduced[name]:
            step()
    timings = interleave(steps, rounds=rounds, seconds=seconds, clock=common_clock)
    return [_row(network, name, timings, reduced) for name in VARIANTS]


def _row(network: Network, name: str, timings: Timings, reduced: dict[str, Collectives]) -> RankRow:
    time, ratio = timings.time(name), timings.ratio(name, REFERENCE)
    assert time is not None and ratio is not None, timings.errors
    alone = VARIANTS[name].alone
    reduction = None if alone is None else timings.ratio(name, alone)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in network.build().parameters())
    return RankRow(
        model=network.name,
        ranks=distributed.get_world_size(),
        optimizer=name,
        batch_size=network.batch_size,
        parameters=parameters,
        ms=1e3 * time.value,
        ms_spread=1e3 * time.spread,
        ratio_to_sgd=ratio.value,
        ratio_spread=ratio.spread,
        reduction_ratio=None if reduction is None else reduction.value,
        reduction_spread=None if reduction is None else reduction.spread,
        reductions=reduced[name].calls,
        reduced_bytes=reduced[name].bytes,
        steps_per_block=timings.steps[name],
    )


def measure_ranks(name: str, ranks: int, *, rounds: int, seconds: float) -> list[RankRow]:
    """Measure a network of the given name on so many new processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, name, rounds, seconds)
        spawn(_in_process, arguments, nprocs=ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    return [RankRow(**row) for row in rows]


def _in_process(  # noqa: PLR0917 - spawned with positional arguments
    rank: int, ranks: int, folder: str, name: str, rounds: int, seconds: float
) -> None:  # pragma: no cover - runs in a process of its own
    torch.set_num_threads(1)
    network = NETWORKS[name.removesuffix(TINY)]
    with process_group(rank, ranks, Path(folder) / "meeting"):
        rows = measure_here(
            tiny(network) if name.endswith(TINY) else network, rounds=rounds, seconds=seconds
        )
        if rank == 0:
            text = json.dumps([asdict(row) for row in rows])
            (Path(folder) / "rows.json").write_text(text, encoding="utf-8")
        distributed.barrier()  # nobody leaves while another still sends


@contextmanager
def process_group(rank: int, ranks: int, meeting: Path) -> Iterator[None]:
    """The default process group, on the CPU; its members meet at a file that is not there yet."""
    distributed.init_process_group(
        "gloo", init_method=meeting.as_uri(), rank=rank, world_size=ranks, timeout=PATIENCE
    )
    try:
        yield
    finally:
        # A thread of the group that still holds a tensor aborts an interpreter that ends
        # (https://github.com/pytorch/pytorch/issues/190489). Models in cycles of references hold
        # the group; without them destroying it waits for its threads.
        gc.collect()
        distributed.destroy_process_group()


def bench_ranks(
    networks: Sequence[Network],
    sizes: Sequence[int],
    out: Path,
    *,
    rounds: int,
    seconds: float,
    tell: Callable[[str], object],
) -> None:
    """Measure every network on every number of ranks.

    Args:
        networks: What to train.
        sizes: Numbers of ranks.
        out: Folder for the rows, which are written after every network.
        rounds: Timed blocks of each optimizer.
        seconds: About how long a block takes.
        tell: Is told what came out, sentence by sentence.
    """
    rows: list[RankRow] = []
    for network in networks:
        for ranks in sizes:
            made = measure_ranks(network.name, ranks, rounds=rounds, seconds=seconds)
            tell(summary(made))
            rows += made
        save_ranks(rows, out, {"rounds": rounds, "block_seconds": seconds})
