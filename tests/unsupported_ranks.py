"""What processes do in tests of what does not hold yet; in a module that they can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from data_parallel import BATCH, Network, data
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from virtualgrad import SVGD


def _step(run: Any, optimizer: SVGD, x: Tensor, rank: int, ranks: int) -> None:
    optimizer.zero_grad()
    mine = x.split(BATCH // ranks)[rank]
    (run(mine).square().mean(1).sum() / len(mine)).backward()
    optimizer.step()


def compiled_shards(rank: int, ranks: int, cases: list[tuple[bool, bool]]) -> list[str]:
    """What is said when a sharded model (or a part of it) is compiled, fullgraph or not."""
    return [_compiled_shards(rank, ranks, *case) for case in cases]


def _compiled_shards(rank: int, ranks: int, whole: bool, fullgraph: bool) -> str:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (ranks,))
    model = Network()
    for part in (model.head, model):
        fully_shard(part, mesh=mesh)
    run: Any = model
    if whole:
        run = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    else:
        model.head.compile(fullgraph=fullgraph, backend="aot_eager")
    try:
        _step(run, SVGD(model, 1e-2, stale=True), data()[0], rank, ranks)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def sharded_checkpoint(rank: int, ranks: int, path: str) -> list[int]:
    """How many sites have an r: where it is saved, and where it is loaded without expect_state."""
    found = []
    mesh = init_device_mesh("cpu", (ranks,))
    for number in range(2):
        model = Network()
        del model.expert  # torch's own get_state_dict makes momentum for what was never used
        for part in (model.head, model):
            fully_shard(part, mesh=mesh)
        optimizer = SVGD(model, 1e-2, stale=True)
        if number == 0:
            _step(model, optimizer, data()[0], rank, ranks)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if number == 0:
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        found.append(len(optimizer.operator.state))
    return found


class Normalised(nn.Module):
    """A convolution with a batch norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))


def train_normalised(rank: int, ranks: int, device: str, options: Any) -> dict[str, Tensor]:
    """Ranks with SyncBatchNorm, or one process with batch norm."""
    model: nn.Module = Normalised().double().to(device)
    run = model
    if ranks > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        run = DistributedDataParallel(model)
    optimizer = SVGD(run, 1e-2, **options)
    for x in data():
        _step(run, optimizer, x.to(device), rank, ranks)
    return {name: value.cpu() for name, value in model.state_dict().items()}
