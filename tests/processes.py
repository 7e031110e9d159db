"""Run a function in several processes that torch.distributed connects, on the CPU."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed


def _enter(  # noqa: PLR0917 - spawned with positional arguments
    rank: int, ranks: int, port: int, out: str, function: Any, args: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
    )
    try:
        torch.save(function(rank, ranks, *args), Path(out) / f"{rank}.pt")
        distributed.barrier()  # nobody leaves while another still sends
    finally:
        # A thread of Gloo's that still holds a tensor aborts an interpreter that ends, whatever the
        # optimizer (https://github.com/pytorch/pytorch/issues/190489): nothing may hold the groups
        # when they are destroyed, and where all went well the interpreter does not end itself.
        gc.collect()
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(rank, ranks, *args)`` returns in each of several processes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(_enter, (ranks, port, out, function, args), nprocs=ranks)  # type: ignore[no-untyped-call]
        return [torch.load(Path(out) / f"{rank}.pt") for rank in range(ranks)]
