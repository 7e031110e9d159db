"""What the processes of the data parallel tests do; in a module that they can import."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from virtualgrad import SVGD, VirtualGradientDescent
from virtualgrad.errors import NonFiniteError
from virtualgrad.operators import RMS, Clip, Sign, compose
from virtualgrad.optim import expect_state

BATCH = 8


class Network(nn.Module):
    """Layers with and without a sample axis; ``expert`` gets the rows that ``picked`` names."""

    def __init__(self, with_place: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.with_place = with_place
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.LayerNorm(4)
        self.place = nn.Parameter(torch.rand(5, 4))
        self.expert, self.head = nn.Linear(4, 4), nn.Linear(20, 5)
        self.double()

    def forward(self, x: Tensor, picked: Tensor | None = None) -> Tensor:
        x = self.norm(self.conv(x).mT)
        x = torch.tanh(x + self.place.cumsum(0) if self.with_place else x)
        if picked is not None:
            extra = torch.zeros_like(x)
            if picked.any():
                extra[picked] = self.expert(x[picked])
            x = x + extra
        return self.head(x.flatten(1))


def data(steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, 3, 7, generator=generator).double() for _ in range(steps)]


def make(model: nn.Module, options: Any) -> Any:
    if isinstance(options, str):
        operators: dict[str, Any] = {
            "sign": Sign,
            "composed": lambda: compose(Clip(0.5), RMS(stale=True)),
        }
        return VirtualGradientDescent(model, 1e-2, operators[options]())
    return SVGD(model, 1e-2, **options)


def alone(options: Any, weights: list[float] | None = None) -> dict[str, Tensor]:
    """One process with the whole batch; ``weights`` of its samples in the loss."""
    model = Network(with_place=not isinstance(options, str))
    optimizer = make(model, options)
    for x in data():
        optimizer.zero_grad()
        losses = model(x).square().mean(1)
        scale = torch.tensor(weights or [1 / BATCH] * BATCH, dtype=torch.float64)
        (losses * scale).sum().backward()
        optimizer.step()
    return model.state_dict()


def in_pieces(options: Any, ranks: int, pieces: int) -> dict[str, Tensor]:
    """One process, whose micro-batches are those that several ranks do at a time."""
    model = Network()
    optimizer = make(model, options)
    for x in data():
        optimizer.zero_grad()
        of_ranks = [mine.chunk(pieces) for mine in x.split(BATCH // ranks)]
        for parts in zip(*of_ranks, strict=True):
            (model(torch.cat(parts)).square().mean(1).sum() / BATCH).backward()
        optimizer.step()
    return model.state_dict()


def together(  # noqa: PLR0917 - spawned with positional arguments
    rank: int, ranks: int, options: Any, given: str, pieces: int, sizes: list[int] | None
) -> dict[str, Tensor]:
    model = Network(with_place=not isinstance(options, str))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = make(ddp if given == "ddp" else model, options)
    sizes = sizes or [BATCH // ranks] * ranks
    for x in data():
        optimizer.zero_grad()
        mine = x.split(sizes)[rank]
        for number, part in enumerate(mine.chunk(pieces)):
            last = number == pieces - 1
            with nullcontext() if last else ddp.no_sync():
                (ddp(part).square().mean(1).sum() / len(mine)).backward()
        optimizer.step()
    return model.state_dict()


def with_experts(rank: int, ranks: int) -> dict[str, Any]:
    """Only the first half of the batch, and so one rank alone, has rows for the expert."""
    model = Network()
    run = DistributedDataParallel(model, find_unused_parameters=True) if ranks > 1 else model
    optimizer = SVGD(run, 1e-2, stale=True, share_positions=True)
    for step, x in enumerate(data()):
        optimizer.zero_grad()
        picked = torch.zeros(BATCH, dtype=torch.bool)
        picked[: 2 * step] = True  # none, then two, then four: the site is new in the second step
        each = BATCH // ranks
        here = slice(rank * each, (rank + 1) * each)
        run(x[here], picked[here]).square().mean(1).mean().backward()
        optimizer.step()
    return {**model.state_dict(), **{k: s["r"] for k, s in optimizer.operator.state.items()}}


def not_shared(rank: int, ranks: int) -> dict[str, Tensor]:
    model = Network()
    optimizer = SVGD(model, 1e-2, process_group=None)
    if rank == 0:  # a rank that trains alone waits for nobody
        optimizer.zero_grad()
        model(data()[0]).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def with_nan(rank: int, ranks: int) -> str:
    model = Network()
    ddp = DistributedDataParallel(model)
    optimizer = SVGD(ddp, 1e-2, stale=True)
    x = data()[0].split(BATCH // ranks)[rank]
    if rank == 1:
        x = x * float("nan")
    ddp(x).square().mean().backward()
    try:
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__} {len(optimizer.operator.state)}"
    return "no error"


def joined(rank: int, ranks: int, options: Any) -> str:
    """Rank 0 has a batch more than the others."""
    model = Network()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = SVGD(model, 1e-2, **options)
    try:
        with ddp.join():
            for x in data()[: 3 if rank == 0 else 2]:
                optimizer.zero_grad()
                ddp(x.split(BATCH // ranks)[rank]).square().mean().backward()
                optimizer.step()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def with_sign(rank: int, ranks: int) -> str:
    """Sign is not linear, so the signs of the ranks' g do not add up to that of their sum."""
    model = Network()
    VirtualGradientDescent(model, 1e-2, Sign()).zero_grad()
    optimizer = VirtualGradientDescent(Network(), 1e-2, Sign())
    try:
        optimizer.model(data()[0]).square().mean().backward()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def compiled(rank: int, ranks: int, options: Any, *, fullgraph: bool = True) -> dict[str, Tensor]:
    """As ``together``, with the model compiled; two pieces a step."""
    model = Network()
    optimizer = SVGD(model, 1e-2, **options)
    ddp = DistributedDataParallel(
        torch.compile(model, fullgraph=fullgraph, backend="aot_eager"),  # type: ignore[arg-type]
        find_unused_parameters=True,
    )
    for x in data():
        optimizer.zero_grad()
        mine = x.split(BATCH // ranks)[rank]
        for number, part in enumerate(mine.chunk(2)):
            with nullcontext() if number == 1 else ddp.no_sync():
                (ddp(part).square().mean(1).sum() / len(mine)).backward()
        optimizer.step()
    return model.state_dict()


def sharded(rank: int, ranks: int, options: Any, **policy: Any) -> dict[str, Tensor]:
    """Training under FSDP2: the head is a unit of its own, the rest another."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = Network()
    for part in (model.head, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = SVGD(model, 1e-2, **options)
    for x in data():
        optimizer.zero_grad()
        mine = x.split(BATCH // ranks)[rank]
        (model(mine).square().mean(1).sum() / len(mine)).backward()
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def sharded_in_pieces(rank: int, ranks: int, options: Any, sizes: list[int]) -> dict[str, Tensor]:
    """FSDP2's no_sync: gradients stay whole on every rank until the last micro-batch."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = Network()
    for part in (model.head, model):
        fully_shard(part, mesh=mesh)
    optimizer = SVGD(model, 1e-2, **options)
    for x in data():
        optimizer.zero_grad()
        mine = x.split(BATCH // ranks)[rank]
        for number, part in enumerate(mine.split(sizes)):
            model.set_requires_gradient_sync(number == len(sizes) - 1)
            (model(part).square().mean(1).sum() / len(mine)).backward()
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def sharded_in_bfloat16(rank: int, ranks: int) -> dict[str, Tensor]:
    """Parameters and inputs used in bfloat16, gradients reduced in float32."""
    torch._C._set_mkldnn_enabled(False)  # see without_onednn in tests/promises/conftest.py
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    found = sharded(rank, ranks, {"stale": True, "scale": 1e-3}, **policy)
    torch._C._set_mkldnn_enabled(True)
    return found


def scaled(rank: int, ranks: int, kind: str) -> dict[str, Tensor]:
    """A GradScaler with clipping; in the second step the last rank alone has an infinite g."""
    model: nn.Module = Network()
    run = model
    if kind == "ddp":
        run = DistributedDataParallel(model, find_unused_parameters=True)
    elif kind == "fsdp":
        for part in (model.head, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (ranks,)))
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer = SVGD(run, 1e-2, stale=True, momentum=0.5, grad_scaler=scaler)
    first, *others = data()
    for x in (first, None, *others):
        optimizer.zero_grad()
        mine = (first if x is None else x).split(BATCH // ranks)[rank]
        if x is None and rank == ranks - 1:
            mine = mine * float("inf")
        scaler.scale(run(mine).square().mean(1).mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9  # all ranks have skipped the step
    state = model.state_dict()
    return {n: v.full_tensor() if kind == "fsdp" else v for n, v in state.items()}


def sharded_in_float32(rank: int, ranks: int) -> dict[str, Tensor]:
    """Parameters in float64, gathered and used in float32."""
    policy = {"param_dtype": torch.float32, "reduce_dtype": torch.float64}
    return sharded(rank, ranks, {"stale": True, "scale": 1e-3}, **policy)


def _sharded_pair(ranks: int) -> tuple[nn.Module, SVGD]:
    mesh = init_device_mesh("cpu", (ranks,))
    model = Network()
    del model.expert  # torch's own get_state_dict makes momentum for what was never used
    for part in (model.head, model):
        fully_shard(part, mesh=mesh)
    return model, SVGD(model, 1e-2, stale=True, momentum=0.5)


def _go_on(model: nn.Module, optimizer: SVGD, rank: int, ranks: int) -> dict[str, Tensor]:
    for x in data(4)[2:]:
        optimizer.zero_grad()
        mine = x.split(BATCH // ranks)[rank]
        (model(mine).square().mean(1).sum() / len(mine)).backward()
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def save_shards(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    """Train, save with torch.distributed.checkpoint, and go on."""
    model, optimizer = _sharded_pair(ranks)
    _go_on(model, optimizer, rank, ranks)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return _go_on(model, optimizer, rank, ranks)


def load_shards(rank: int, ranks: int, path: str) -> dict[str, Tensor]:
    """Load what any number of ranks has saved, and go on."""
    model, optimizer = _sharded_pair(ranks)
    found = expect_state(optimizer, dcp.FileSystemReader(path).read_metadata())
    assert len(found) == 4, found
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return _go_on(model, optimizer, rank, ranks)


def several(rank: int, ranks: int, tasks: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Do several of the above, one after the other: processes are slow to start."""
    return [globals()[name](rank, ranks, *arguments) for name, arguments in tasks]


def step_with_nan_in_one_shard(rank: int, ranks: int) -> tuple[bool, bool]:
    """Whether a process saw that a gradient is NaN on the last one, and kept its parameters."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = SVGD(model, 0.1)
    model(torch.ones(2, 3)).sum().backward()
    before = [p.to_local().clone() for p in model.parameters()]
    if rank == ranks - 1:
        model.weight.grad.to_local()[0, 0] = float("nan")
    try:
        optimizer.step()
        seen = False
    except NonFiniteError:
        seen = True
    after = [p.to_local() for p in model.parameters()]
    return seen, all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
