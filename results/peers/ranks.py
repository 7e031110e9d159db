"""Several processes: one probe per feature, asked with the name of a library."""

# ruff: noqa: PLC0415 - each library is imported where it is asked for

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from libraries import (
    BATCH,
    MLP,
    NO,
    PARTIAL,
    SINGD,
    BackPACK,
    Opacus,
    Verdict,
    data,
    difference,
    opacus_train,
    oracle,
    plain_step,
    train,
    verdict,
)
from torch import Tensor, nn


def _enter(rank: int, folder: str, work: Any, library: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        said = work(rank, library)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        said = ("no", f"{type(error).__name__}: {lines[0]}"[:200])
    torch.save(said, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _on_two_ranks(work: Any, library: str) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (folder, work, library), nprocs=2)
        said = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]
    return min(said, key=lambda verdict: ["no", "partial", "yes"].index(verdict[0]))


def _mine(rank: int) -> slice:
    half = BATCH // 2
    return slice(rank * half, (rank + 1) * half)


def _local_gradients(model: nn.Module, run: Any, kind: Any, rank: int) -> str:
    """What is wrong with the gradients of this rank's samples."""
    x, y = data()
    here = _mine(rank)
    expected = {name: value[here] for name, value in oracle(model, x, y).items()}
    attached, called = run(model)
    kind.backward(F.cross_entropy(called(x[here]), y[here]))
    found = kind.found(attached)
    if kind is BackPACK:
        found = {n: None if v is None else v / 2 for n, v in found.items()}
    return difference(found, expected)


def _ddp(rank: int, library: str) -> Verdict:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = MLP().double()
    if library == "backpack":

        def run(model: nn.Module) -> tuple[Any, Any]:
            attached = BackPACK.attach(model)
            return attached, DistributedDataParallel(attached)

        wrong = _local_gradients(model, run, BackPACK, rank)
        return (
            (NO, wrong) if wrong else (PARTIAL, "each rank has its own samples'; nothing is shared")
        )

    def half_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x[_mine(rank)], y[_mine(rank)])

    if library == "singd":
        refused = "takes the wrapper"
        try:
            SINGD.optimizer(DistributedDataParallel(MLP().double()))
        except TypeError as error:
            refused = f"refuses the wrapper ({error})"
        wrong = difference(train(SINGD.optimizer, half_step), train_alone("singd"))
        if wrong:
            return NO, f"{refused}; without it: {wrong}"
        return PARTIAL, "without the wrapper, which it refuses: equal to one process"
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
    from opacus.optimizers import DistributedDPOptimizer

    def optimizer(model: nn.Module) -> Any:
        return DistributedDPOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            noise_multiplier=0.0,
            max_grad_norm=1e9,
            expected_batch_size=BATCH // 2,
        )

    found = train(optimizer, half_step, attach=lambda m: Opacus.attach(DPDDP(m)))
    found = {name.removeprefix("module."): value for name, value in found.items()}
    return verdict(difference(found, opacus_train()), "with its own wrapper equal to one process")


def train_alone(library: str) -> dict[str, Tensor]:
    """One process: what a library finds when it is not told of the others."""
    initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        return train(SINGD.optimizer)
    finally:
        dist.is_initialized = initialized


def ddp(library: str) -> Verdict:
    return _on_two_ranks(_ddp, library)


def _fsdp2(rank: int, library: str) -> Verdict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = MLP().double()
    x, y = data()
    here = _mine(rank)
    if library == "opacus":
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
            GradSampleModuleFastGradientClippingFSDP as Sampler,
        )
        from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import (
            FSDPOptimizerFastGradientClipping,
        )
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
        from opacus.utils.fsdp_utils import FSDP2Wrapper

        sampler = Sampler(
            FSDP2Wrapper(model, mesh=mesh), max_grad_norm=1e9, use_ghost_clipping=True
        )
        optimizer = FSDPOptimizerFastGradientClipping(
            torch.optim.SGD(sampler.parameters(), 0.1),
            noise_multiplier=0.0,
            max_grad_norm=1e9,
            expected_batch_size=BATCH // 2,
        )
        criterion = DPLossFastGradientClipping(sampler, optimizer, nn.CrossEntropyLoss())
        for _ in range(3):
            optimizer.zero_grad()
            criterion(sampler(x[here]), y[here]).backward()
            optimizer.step()
        found = {
            n.removeprefix("_module."): p.full_tensor().detach()
            for n, p in sampler.named_parameters()
        }
        wrong = difference(found, opacus_train())
        return (NO, wrong) if wrong else (PARTIAL, "with its own wrapper and ghost clipping: right")
    if library == "backpack":

        def run(model: nn.Module) -> tuple[Any, Any]:
            attached = BackPACK.attach(model)
            fully_shard(attached, mesh=mesh)
            return attached, attached

        return verdict(_local_gradients(model, run, BackPACK, rank), "right for the rank's samples")
    fully_shard(model, mesh=mesh)
    optimizer = SINGD.optimizer(model)
    try:
        for _ in range(3):
            plain_step(model, optimizer, x[here], y[here])
    except KeyError:
        return NO, "KeyError: parameters are known by their data_ptr(), which FSDP2 changes"
    found = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return verdict(difference(found, train_alone("singd")), "equal to one process")


def fsdp2(library: str) -> Verdict:
    return _on_two_ranks(_fsdp2, library)
