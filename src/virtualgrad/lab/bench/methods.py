"""The optimizers that are compared, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RMSprop

from virtualgrad import SVGD, every_linear_site, weights_only
from virtualgrad.sites import Where

LR = 1e-6
"""So small that thousands of steps on one batch change nothing that could change the speed."""

REFERENCE = "sgd"
"""What all others are compared with."""


@dataclass(frozen=True)
class Statistics:
    """What SVGD keeps r of, for the count of the bytes that this must move.

    Attributes:
        where: The sites on which T acts.
        share_positions: Whether r is averaged over positions.
    """

    where: Where
    share_positions: bool = False


@dataclass(frozen=True)
class Method:
    """An optimizer, and what has to happen to the model for it.

    Attributes:
        name: In options and records.
        title: In tables.
        make: The optimizer of a model; the second argument asks for one that a CUDA graph can
            hold, with all its state on the device.
        statistics: Of an SVGD. It is attached to its model, which is compiled with it.
        eager_only: Whether it differs from another one only in what the host does.
        foreign: Whether it is of another library.
        prepare: What other libraries do to the model first.
        backward: Calls ``loss.backward()``, in whatever context other libraries want it.
    """

    name: str
    title: str
    make: Callable[[nn.Module, bool], Optimizer]
    statistics: Statistics | None = None
    eager_only: bool = False
    foreign: bool = False
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    backward: Callable[[Tensor], object] = Tensor.backward


def _sgd(model: nn.Module, capturable: bool) -> Optimizer:
    return SGD(model.parameters(), LR)


def _momentum(model: nn.Module, capturable: bool) -> Optimizer:
    return SGD(model.parameters(), LR, momentum=0.9)


def _rmsprop(model: nn.Module, capturable: bool) -> Optimizer:
    return RMSprop(model.parameters(), LR, capturable=capturable)


def _adam(model: nn.Module, capturable: bool) -> Optimizer:
    return Adam(model.parameters(), LR, foreach=True, capturable=capturable)


def _adam_fused(model: nn.Module, capturable: bool) -> Optimizer:
    return Adam(model.parameters(), LR, fused=True, capturable=capturable)


def _svgd(model: nn.Module, capturable: bool) -> Optimizer:
    return SVGD(model, LR)


def _svgd_released(model: nn.Module, capturable: bool) -> Optimizer:
    return SVGD.released(model, LR)


def _svgd_unchecked(model: nn.Module, capturable: bool) -> Optimizer:
    return SVGD.released(model, LR, nonfinite="ignore")


def _svgd_shared(model: nn.Module, capturable: bool) -> Optimizer:
    return SVGD.released(model, LR, share_positions=True)


METHODS = {
    method.name: method
    for method in (
        Method("sgd", "SGD", _sgd),
        Method("momentum", "SGD + momentum", _momentum),
        Method("rmsprop", "RMSprop", _rmsprop),
        Method("adam", "Adam", _adam),
        Method("adam-fused", "Adam, fused", _adam_fused),
        Method("svgd", "SVGD", _svgd, Statistics(every_linear_site)),
        Method("svgd-released", "SVGD released", _svgd_released, Statistics(weights_only)),
        Method(
            "svgd-unchecked",
            "SVGD released, NaN ignored",
            _svgd_unchecked,
            Statistics(weights_only),
            eager_only=True,
        ),
        Method(
            "svgd-shared",
            "SVGD shared",
            _svgd_shared,
            Statistics(weights_only, share_positions=True),
        ),
    )
}
"""In the order of the tables."""
