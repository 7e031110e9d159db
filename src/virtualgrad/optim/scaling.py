"""The factor of the loss, by which a torch.amp.GradScaler keeps small gradients from vanishing.

torch's own optimizers divide it out of the gradients. Here that would come too late: T forgets the
scale of g, so T(factor * g) is no longer in proportion to the factor. T must know it by the time
of the backward pass, or at the latest before its state is committed.
"""

from __future__ import annotations

from torch import Tensor
from torch.amp import GradScaler

from virtualgrad.errors import ScaledLossError
from virtualgrad.operators import StatefulOperator
from virtualgrad.virtual import Intercept


def loss_scale(scaler: GradScaler | None) -> float:
    """The factor of the loss in the next backward pass."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def announce(scale: float, operator: StatefulOperator, intercept: Intercept) -> None:
    """Tell T the factor if it wants to know, or else the passes, which hand it g without."""
    if operator.loss_scale is not None:
        operator.loss_scale = scale
    elif operator.ranks is not None:  # the loss of a rank is W times its share in the loss of all
        scale *= operator.ranks.size
    intercept.passes.loss_scale = scale


def learn_late(scale: Tensor | None, operator: StatefulOperator) -> bool:
    """Tell T the factor after the backward pass; whether it can still make use of it."""
    was_told = getattr(operator, "scale_was", None)
    return scale is not None and was_told is not None and was_told(float(scale))


def unknown_scaler(optimizer: str) -> ScaledLossError:
    """The error for a scaler that T does not know, and has not learned of in time."""
    return ScaledLossError.of(
        given="a step by a torch.amp.GradScaler that the optimizer does not know",
        allowed="losses as they are, or a scaler that T knows of: T forgets the scale of "
        "g, so undoing it afterwards would shrink the step",
        todo=f"pass it, {optimizer}(model, ..., grad_scaler=scaler), or set "
        "optimizer.grad_scaler = scaler",
    )
