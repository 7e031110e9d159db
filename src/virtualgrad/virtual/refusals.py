"""Encapsulation 1, forward passes in which ops would not be seen, or taken for others: refused."""

from __future__ import annotations

import threading
from typing import NoReturn

from virtualgrad.compiling import never_traced
from virtualgrad.errors import HyperparameterError, ModelError


def refuse_thread(path: str) -> NoReturn:
    """Raise where a module runs while a pass of its model is under way in another thread."""
    raise ModelError.of(
        given=f"the module {path or '(model)'!r} in the thread {threading.current_thread().name!r} "
        "while a forward pass of its model runs in another thread",
        allowed="one thread at a time: the ops of others are not seen, and their gradients would "
        "be plain ones",
        todo="run the layers in the thread of the forward pass, or give each thread a "
        "copy.deepcopy of the model with an optimizer of its own",
    )


@never_traced("virtualgrad: FSDP2 or torch.compile, not yet both")
def refuse_compiled_shards(path: str) -> None:
    """Raise where sharded parameters meet a compiler: it knows the gathered ones by no name."""
    raise ModelError.of(
        given=f"the sharded module {path or '(model)'!r} in a compiled pass",
        allowed="FSDP2 or torch.compile, not yet both",
        todo="leave out torch.compile, or use DistributedDataParallel with it",
    )


@never_traced("virtualgrad: two optimizers on one model or torch.compile, not both")
def refuse_compiled_pair(path: str) -> None:
    """Raise where the interceptions of two optimizers meet a compiler: it mixes them up."""
    raise ModelError.of(
        given=f"the module {path or '(model)'!r}, to which two optimizers of virtualgrad are "
        "attached, in a compiled pass",
        allowed="one of them on a compiled model; both on one that runs eagerly",
        todo="give one optimizer several parameter groups: params=[{'params': ..., 'lr': ...}, "
        "...]; each may have its own lr, scale, rho and eps",
    )


@never_traced("virtualgrad: the inputs have no axis batch_dim")
def refuse_inputs(name: str, batch_dim: int, shape: str) -> None:
    """Raise where no tensor among the inputs has the axis that is to count samples."""
    raise HyperparameterError.of(
        given=f"batch_dim={batch_dim} for {name}, whose first input has the shape {shape}",
        allowed=f"inputs among which there is a tensor with more than {batch_dim} axes",
        todo="choose for batch_dim the axis of the inputs that counts samples, from 0 on",
    )


@never_traced("virtualgrad: a part of the model is compiled in the middle of an eager pass")
def refuse_late_compilation() -> None:
    """Raise where a compiler comes to a model whose eager passes mark parameters."""
    raise ModelError.of(
        given="a part of the model that is compiled for the first time in a later pass than the "
        "first one",
        allowed="parts that are compiled in the first pass with their optimizer: passes behind it "
        "mark the parameters, which a compiler must not meet",
        todo="call the model again, which knows of the compiled part now; or compile it before the "
        "optimizer is made",
    )
