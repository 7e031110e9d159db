r"""Encapsulation 1, SyncBatchNorm on several processes: weight and bias in an op that can be seen.

There torch.nn runs a Function of its own, which takes weight and bias and shows its inside to
nobody. But a batch norm falls into two,

    x^ = (x - mean) / sqrt(var + eps)      mean and var of the samples of all processes
    sigma = w x^ + b

so x^ is made by the very same Function, without weight and bias, and sigma by a batch norm with the
mean 0 and the variance 1. That one is seen as every batch norm is: the same site, the same T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.compiler import is_compiling

from virtualgrad.compiling import never_traced
from virtualgrad.errors import ModelError
from virtualgrad.sites import Site, read_layout
from virtualgrad.virtual.intercept import Intercept

Forward = Callable[..., Any]


def seen(forward: Forward, intercept: Intercept, path: str) -> Forward:
    """The forward of a SyncBatchNorm, with T at its weight and bias wherever it acts there.

    Args:
        forward: of its class.
        intercept: the interception that it runs under.
        path: of the module.
    """

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not is_synchronised(module) or not _is_transformed(module, x, intercept, path):
            return forward(module, *args, **kwargs)
        if is_compiling():
            _refuse_compiled(path)
        if forward is not nn.SyncBatchNorm.forward:
            raise ModelError.of(
                given=f"a forward of its own in {path}, a kind of SyncBatchNorm, on several "
                "processes",
                allowed="nn.SyncBatchNorm itself: its Function hides weight and bias",
                todo="leave it out: where=lambda site: site.op != 'batch_norm'",
            )
        normalised = forward(_WithoutWeights(module), *args, **kwargs)
        return _scaled(normalised, module)

    return run


def is_synchronised(module: nn.SyncBatchNorm) -> bool:
    """Whether a SyncBatchNorm is one now: in training, with others in its process group."""
    if not (module.training and distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(module.process_group or distributed.group.WORLD) > 1


def _is_transformed(module: nn.SyncBatchNorm, x: Any, intercept: Intercept, path: str) -> bool:
    """Whether T acts at its weight or its bias."""
    uses = []
    for role in ("weight", "bias"):
        parameter = getattr(module, role)
        name = None if parameter is None else intercept.tracked.name_of(parameter)
        if name is not None:
            uses.append((name, role))
    if not uses or not isinstance(x, Tensor) or x.dim() < 2:
        return False
    key = f"{path or '(model)'}:batch_norm({uses[0][1]})"
    layout = read_layout(tuple(x.shape), frozenset({1}), batch_size=None)
    names, roles = zip(*uses, strict=True)
    return intercept.acts_at(Site(key, "batch_norm", names, roles, True, tuple(x.shape), layout))


class _WithoutWeights:
    """A SyncBatchNorm as its forward sees it, less weight and bias; running means are its own."""

    weight = None
    bias = None

    def __init__(self, module: nn.SyncBatchNorm) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _scaled(normalised: Tensor, module: nn.SyncBatchNorm) -> Tensor:
    """W x^ + b, as a batch norm that has nothing left to normalise."""
    weight = module.weight
    zeros, ones = (torch.full_like(weight, number, requires_grad=False) for number in (0, 1))
    return F.batch_norm(normalised, zeros, ones, weight, module.bias, training=False, eps=0.0)


@never_traced("virtualgrad: SyncBatchNorm on several processes is not compiled")
def _refuse_compiled(path: str) -> None:
    raise ModelError.of(
        given=f"the SyncBatchNorm {path} in a compiled pass on several processes",
        allowed="an eager pass: its Function hides weight and bias, and waits for the others",
        todo="do not compile, or leave it out: where=lambda site: site.op != 'batch_norm'",
    )
