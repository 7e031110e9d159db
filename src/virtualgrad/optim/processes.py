"""Which processes share a batch with this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from virtualgrad.errors import HyperparameterError, ModelError
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.ranks import Ranks


def find_ranks(
    model: nn.Module, process_group: Any, device: torch.device, operator: StatefulOperator
) -> Ranks | None:
    """The processes that share a batch; None if there is only this one.

    Args:
        model: the model as the user gave it.
        process_group: as the user gave it: a group, "auto" or None.
        device: where the model lies.
        operator: T. One that needs statistics in the backward pass gets a group of its own, where
            nothing of DDP's can come between.
    """
    if process_group is None or not distributed.is_available():
        return None
    if isinstance(process_group, str) and process_group != "auto":
        raise HyperparameterError.of(
            given=f"process_group={process_group!r}",
            allowed='a process group of torch.distributed, "auto" or None',
            todo="leave it out to share statistics with all processes",
        )
    if not distributed.is_initialized():
        return None
    group = process_group
    if process_group == "auto":
        is_ddp = isinstance(model, DistributedDataParallel)
        group = model.process_group if is_ddp else distributed.group.WORLD
    if distributed.get_world_size(group) == 1:
        return None
    if not getattr(operator, "stale", True):
        group = distributed.new_group(distributed.get_process_group_ranks(group))
    knows_the_loss = operator.loss_scale is not None
    return Ranks(group, device, divisor=None if knows_the_loss else 1)


def refuse_join() -> None:
    """Raise in a forward pass inside ``DistributedDataParallel.join()``.

    A rank that has no more batches answers DDP's reductions there, but not those of the statistics:
    the others would wait for it for ever.
    """
    active = DistributedDataParallel._active_ddp_module
    if active is not None and active._join_config.enable:
        raise ModelError.of(
            given="a forward pass inside DistributedDataParallel.join()",
            allowed="the same number of batches on every rank; they may have different sizes",
            todo="let all ranks stop with the first that has no more batches, or pass "
            "process_group=None for statistics of each rank's own",
        )
