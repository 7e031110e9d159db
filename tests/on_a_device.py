"""What the processes of the GPU tests do, on any device; in a module that they can import."""

from __future__ import annotations

from typing import Any

import torch
from data_parallel import BATCH, Network, data
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from virtualgrad import SVGD, Checkpoints

Found = dict[str, Tensor]


def _train(run: nn.Module, optimizer: SVGD, rank: int, ranks: int, device: str) -> None:
    for x in data():
        optimizer.zero_grad()
        mine = x.to(device).split(BATCH // ranks)[rank]
        run(mine).square().mean(1).mean().backward()
        optimizer.step()


def replicated(rank: int, ranks: int, device: str, options: Any) -> Found:
    """DistributedDataParallel over gloo; all ranks on one GPU, which NCCL would refuse."""
    model = Network().to(device)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    _train(ddp, SVGD(ddp, 1e-2, **options), rank, ranks, device)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def over_own_backend(rank: int, ranks: int, device: str, options: Any) -> Found:
    """The same over NCCL, on a GPU."""
    model = Network().to(device)
    group = distributed.new_group(backend="nccl" if device == "cuda" else "gloo")
    ddp = DistributedDataParallel(model, find_unused_parameters=True, process_group=group)
    _train(ddp, SVGD(ddp, 1e-2, **options), rank, ranks, device)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def sharded(rank: int, ranks: int, device: str, options: Any) -> Found:
    """FSDP2, over NCCL on a GPU."""
    group = distributed.new_group(backend="nccl" if device == "cuda" else "gloo")
    mesh = DeviceMesh.from_group(group, device)
    model = Network().to(device)
    for part in (model.head, model):
        fully_shard(part, mesh=mesh)
    _train(model, SVGD(model, 1e-2, **options), rank, ranks, device)
    return {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}


def resumed(rank: int, ranks: int, device: str, folder: str) -> Found:
    """Train, save, and go on from what was saved, in objects that are made anew."""
    for attempt in range(2):
        model = Network().to(device)
        optimizer = SVGD(model, 1e-2, stale=True, momentum=0.5)
        checkpoints = Checkpoints(folder)
        latest = checkpoints.load()
        assert (latest is None) == (attempt == 0)
        if latest is not None:
            model.load_state_dict(latest.state["model"])
            optimizer.load_state_dict(latest.state["optimizer"])
        _train(
            DistributedDataParallel(model, find_unused_parameters=True),
            optimizer,
            rank,
            ranks,
            device,
        )
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(attempt, state)
    return {name: value.cpu() for name, value in model.state_dict().items()}


def several(rank: int, ranks: int, device: str, tasks: list[tuple[str, Any]]) -> list[Found]:
    """Do several of the above, one after the other: processes are slow to start."""
    if device == "cuda":
        torch.cuda.set_device(0)
    return [globals()[name](rank, ranks, device, options) for name, options in tasks]
