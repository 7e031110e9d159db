r"""What a working optimizer of torch.optim does with a gradient, as numbers.

Its *step* for a gradient g is all that g moves a parameter, now and later:

    SGD:          e g                       e = lr (1 - dampening) / (1 - mu)
    RMSprop:      e g / (sqrt(v) + eps)     e = lr / (1 - mu)
    Adam, AdamW:  e g / (sqrt(v) + eps)     e = lr

with mu the momentum: a buffer b <- mu b + g hands out g + mu g + mu^2 g + ... = g / (1 - mu).
Adam's first moment is an average, (1 - beta) (1 + beta + ...) = 1, so its e is lr. v is the mean
square of the gradient of each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from virtualgrad.errors import HyperparameterError
from virtualgrad.settings.batches import SettingsError

KINDS: tuple[tuple[type[Optimizer], str, bool], ...] = (
    # class, what it is called, whether it divides by the root of v; AdamW is a subclass of Adam
    (torch.optim.SGD, "SGD", False),
    (torch.optim.RMSprop, "RMSprop", True),
    (torch.optim.AdamW, "AdamW", True),
    (torch.optim.Adam, "Adam", True),
)


@dataclass(frozen=True)
class Current:
    """A working optimizer, as far as its steps are concerned.

    Attributes:
        title: what it is called.
        adaptive: whether it divides a gradient by the root of its mean square.
        lr: its learning rate as set, that of the first group.
        rates: name of a parameter -> e, see above.
        eps: added to the root, if adaptive.
        decay: the share of a parameter that a step of its decoupled weight decay takes away; None
            where it has none, or one that T cannot imitate.
        notes: what a reader should know of it.
    """

    title: str
    adaptive: bool
    lr: float
    rates: Mapping[str, float]
    eps: float
    decay: float | None
    notes: tuple[str, ...]

    @property
    def rate(self) -> float:
        """The e of the first group."""
        return next(iter(self.rates.values()))

    def step_size(self, name: str, square: Tensor) -> float:
        """Euclidean norm of the step of a parameter, root mean square over batches.

        Args:
            name: of the parameter.
            square: v, for each of its numbers the mean over batches of g^2.
        """
        root = square.sqrt()
        direction = root / (root + self.eps) if self.adaptive else root
        return self.rates[name] * float(torch.linalg.vector_norm(direction))


def read_current(optimizer: Any, parameters: Mapping[str, Tensor]) -> Current:
    """Read off what an optimizer does.

    Args:
        optimizer: a torch.optim.SGD, RMSprop, Adam or AdamW.
        parameters: name -> parameter of the model.

    Raises:
        SettingsError: It is another optimizer, or one of another model.
        HyperparameterError: A learning rate is not above 0.
    """
    title, adaptive = _kind(optimizer)
    names = {id(parameter): name for name, parameter in parameters.items()}
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        e = _rate(group, title)
        rates |= {names[id(p)]: e for p in group["params"] if id(p) in names and p.requires_grad}
    if not rates:
        raise SettingsError.of(
            given=f"a current {title} without a trainable parameter of this model",
            allowed="an optimizer of the model's own parameters",
            todo="make it with model.parameters()",
        )
    first = optimizer.param_groups[0]
    decay, notes = _decay(optimizer.param_groups, title)
    if len(set(rates.values())) > 1:
        notes.append(
            f"The groups of {title} have different learning rates; one lr and scale stand for all."
        )
    eps = float(first.get("eps", 0.0))
    return Current(title, adaptive, float(first["lr"]), rates, eps, decay, tuple(notes))


def _kind(optimizer: Any) -> tuple[str, bool]:
    for kind, title, adaptive in KINDS:
        if isinstance(optimizer, kind):
            return title, adaptive
    raise SettingsError.of(
        given=f"current={type(optimizer).__name__}",
        allowed=f"an optimizer of torch.optim: {', '.join(title for _, title, _ in KINDS)}",
        todo="pass the optimizer that trains the model now; if it is wrapped, the one inside",
    )


def _rate(group: Mapping[str, Any], title: str) -> float:
    lr, mu = float(group["lr"]), float(group.get("momentum", 0.0))
    if not 0 < lr < float("inf"):
        raise HyperparameterError.of(
            given=f"a current {title} with lr={lr:g}",
            allowed="a learning rate above 0, one that trains the model well",
            todo="set the rate that it has after warm-up, and call this again",
        )
    if mu == 0:
        return lr
    return lr * (1 - float(group.get("dampening", 0.0))) / (1 - mu)


def _decay(groups: list[dict[str, Any]], title: str) -> tuple[float | None, list[str]]:
    """What weight decay takes away in a step, where that does not go through the gradient."""
    found = {float(group["weight_decay"]) for group in groups}
    if found == {0.0}:
        return None, []
    if len(found) > 1:
        return None, ["weight_decay differs between groups: set it in the groups of SVGD."]
    (decay,) = found
    if title == "SGD":  # e (g + decay theta): the part of theta is the decoupled one
        return _rate(groups[0], title) * decay, []
    if title == "AdamW" or groups[0].get("decoupled_weight_decay"):
        return float(groups[0]["lr"]) * decay, []
    return None, [
        f"{title}'s weight_decay is part of the gradient that it divides by its root: nothing in "
        "SVGD equals it, so choose weight_decay yourself."
    ]
