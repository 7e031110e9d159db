"""Sharded checkpoints (torch.distributed.checkpoint): have room for r before it is loaded.

Such a checkpoint is loaded into the state that an optimizer has already, and a fresh one has no r
yet: sites show in the first pass. :func:`expect_state` reads off the checkpoint's metadata which r
it holds, and with which switches they were made, and makes room for them::

    expect_state(optimizer, FileSystemReader(path).read_metadata())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.optim.descent import VirtualGradientDescent
from virtualgrad.optim.switches import MADE_WITH, compare


def expect_state(optimizer: VirtualGradientDescent, metadata: Any) -> list[str]:
    """Make room for the state of T that a sharded checkpoint holds.

    It raises, or warns, as ``load_state_dict`` does, if that was made with other switches.

    Args:
        optimizer: a fresh optimizer on the model that was saved.
        metadata: of the checkpoint, as its reader's ``read_metadata()`` gives it.

    Returns:
        The keys of the sites found.
    """
    parameters = dict(optimizer._named_parameters())
    state: dict[str, dict[str, Tensor]] = {}
    owners: dict[str, tuple[str, ...]] = {}
    made_with: list[str] = []
    for entry, stored in metadata.state_dict_metadata.items():
        before, at, key = entry.partition("@")
        if not at or not hasattr(stored, "size"):
            continue
        path, _, kind = before.rpartition(".")
        owner = next((name for name in parameters if path.endswith(f"state.{name}")), None)
        if owner is None:
            continue
        if kind == MADE_WITH:
            made_with.append(key)
            continue
        device = parameters[owner].device
        room = torch.zeros(stored.size, dtype=stored.properties.dtype, device=device)
        state.setdefault(key, {})[kind] = room
        owners[key] = (owner,)
    intercept = optimizer._attached().intercept
    compare(made_with, optimizer._switches)
    intercept.parameters_at |= owners
    optimizer._transaction.state = optimizer._transaction.state | state
    optimizer._has_only_room = True  # a checkpoint of before would be asked for switches in vain
    return list(state)
