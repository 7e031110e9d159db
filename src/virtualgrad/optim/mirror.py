"""The numbers of T for compiled passes: on the device, beside the parameter groups.

torch.optim keeps hyperparameters in plain dicts, which users and schedulers write to. A compiled
pass that read such a dict would be compiled anew for every learning rate in it. So it reads a
tensor, into which the optimizer copies what the group says in ``zero_grad`` and ``step``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators.counts import keep_static
from virtualgrad.optim.groups import Numbering

NUMBERS = ("scale", "rho", "eps")


class Mirrors:
    """Group -> its numbers as a tensor, an attribute each; made when a pass is compiled."""

    def __init__(self) -> None:
        self._numbering = Numbering()
        self._shown: dict[int, tuple[float, ...]] = {}
        self._loss_scale = 1.0

    @settled_while_tracing
    def prepare(self, parameter: str) -> str:
        """Have a mirror of the group of a parameter; the attribute that holds it.

        A compiler asks again where parameters may be in other groups: the optimizer tells it
        (``edition`` of :mod:`~virtualgrad.virtual.parameters`).
        """
        index = self._numbering.number[parameter]
        name = f"group{index}"
        if index not in self._shown:
            numbers = self._numbers(index)
            device = self._numbering.groups[index]["params"][0].device
            tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
            keep_static(tensor)
            setattr(self, name, tensor)
            self._shown[index] = numbers
        return name

    def renew(self, numbering: Numbering, loss_scale: float, *, is_late: bool = False) -> None:
        """Copy what the groups say now.

        Args:
            numbering: the parameter groups, by the numbers that they have for good.
            loss_scale: the factor of the loss.
            is_late: whether a backward pass has been made since the last time, so that it went by
                the numbers of then.
        """
        self._numbering, self._loss_scale = numbering, loss_scale
        for index, shown in self._shown.items():
            numbers = self._numbers(index)
            if numbers != shown:
                tensor: Tensor = getattr(self, f"group{index}")
                tensor.copy_(torch.tensor(numbers, dtype=torch.float64))
                self._shown[index] = numbers
                if is_late:
                    warnings.warn(
                        f"group {index}: {_change(shown, numbers)} after zero_grad(); the compiled "
                        "backward pass of this step went by the old value, the next one will not. "
                        "Write to param_groups before zero_grad()",
                        stacklevel=5,
                    )

    def _numbers(self, index: int) -> tuple[float, ...]:
        numbers = [float(self._numbering.groups[index][name]) for name in NUMBERS]
        return (*numbers, self._loss_scale)


def _change(old: Sequence[float], new: Sequence[float]) -> str:
    pairs = zip((*NUMBERS, "the loss scale"), old, new, strict=True)
    return ", ".join(f"{name} went from {a:g} to {b:g}" for name, a, b in pairs if a != b)
