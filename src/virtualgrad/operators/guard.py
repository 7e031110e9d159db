"""What a step writes on a GPU, unless a number in it is not finite: nobody waits to know.

    look at all gradients and statistics  ->  flag,     write parameters and r unless the flag is up

The host launches both, and goes on to the next step; it reads the flag when that is launched.
:mod:`.guarded_kernel` has the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators import kernels
from virtualgrad.operators.addresses import Addresses, Table

MOST_STEPS = 2**20
"""Steps are numbered in float32, from 1 to here and again."""


class Descent(NamedTuple):
    """The tensors of a parameter group, ready for :meth:`Guard.descend`."""

    table: Table
    params: Sequence[Tensor]
    buffers: Sequence[Tensor]


class Guard:
    """The flag of one optimizer's steps, and what is written only where it is down.

    Args:
        like: a parameter; all others lie on its device.

    Attributes:
        device: theirs.
        found: the number of the last step that met a NaN or an infinity; behind it, for each tensor
            looked at, that of the last step in which it had one.
        step: the number of this step.
    """

    def __init__(self, like: Tensor) -> None:
        from virtualgrad.operators import guarded_kernel as made  # noqa: PLC0415 - Triton

        self.device = like.device
        self.found = torch.zeros(1, device=like.device)
        self.step = 0.0
        self._look = Addresses(made.look)
        self._descend = Addresses(made.descend)
        self._update_means = Addresses(made.update_means)
        self._exchange = Addresses(made.exchange)

    def tables_of(self, tensors: Sequence[Tensor]) -> list[tuple[Table, list[int]]] | None:
        """The tensors to be looked at, by their dtype, with their places; None: not all can be."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        found = []
        for places in by_dtype.values():
            table = self._look.table([[tensors[place] for place in places]])
            if table is None or table.addresses.device != self.device:
                return None
            found.append((table, places))
        return found

    def descent(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Descent | None:
        """What :meth:`descend` takes; None if it cannot."""
        lists = [params, grads, *([buffers] if buffers else [])]
        table = self._descend.table(lists)
        return None if table is None else Descent(table, params, buffers)

    def look(self, looked_at: Sequence[tuple[Table, list[int]]]) -> list[int]:
        """Begin a step by looking; the places of the tensors in the order of ``found``."""
        order = [place for _, places in looked_at for place in places]
        if self.found.numel() <= len(order):
            self.found = self.found.new_zeros(len(order) + 1)
        self.step = self.step % MOST_STEPS + 1
        first = 0
        for table, places in looked_at:
            table.launch((self.found,), (self.step, first), first)
            first += len(places)
        return order

    def reset(self) -> None:
        """Forget what was found: another step may get the number of this one."""
        self.found.zero_()

    def descend(self, descent: Descent, *, lr: float, momentum: float, weight_decay: float) -> None:
        """Decoupled weight decay and descent, as in ``optim/update.py``, to the same bits."""
        decays = bool(weight_decay)
        numbers = (float(1 - lr * weight_decay), float(momentum), 1.0, float(-lr))
        self._launch(descent.table, numbers, decays, bool(descent.buffers))
        # autograd sees that they have changed, where a graph of before this step needs them
        torch.autograd.graph.increment_version([*descent.params, *descent.buffers])

    def update_means(
        self, means: Sequence[Tensor], norms: Sequence[Tensor], weights: Sequence[float], rho: float
    ) -> bool:
        """R <- rho r + weight N^2 of several sites; False, and nothing is done, if it cannot."""
        table = self._update_means.table([means, norms], weights)
        if table is None or means[0].dtype != torch.float32:
            return False
        assert table.weights is not None
        more = (table.weights, self.found)
        table.launch(more, (self.step, float(rho), table.length), None)
        return True

    def exchange(self, means: Sequence[Tensor], candidates: Sequence[Tensor]) -> bool:
        """R <- candidate, or the other way round; False, and nothing is done, if it cannot."""
        table = self._exchange.table([means, candidates])
        if table is None:
            return False
        self._launch(table, ())
        return True

    def choose(self, new: Tensor, old: Tensor) -> Tensor:
        """The new one where the step is made, else the old one."""
        return torch.where(self.found[0] == self.step, old, new)

    def _launch(self, table: Table, numbers: tuple[float, ...], *options: Any) -> None:
        others = (self.step, *numbers, table.length, *options)
        table.launch((self.found,), others, options)


def may_guard(tensor: Tensor) -> bool:
    """Whether there are kernels for a step on a tensor's device."""
    return kernels.may_launch(tensor.device) and kernels.is_usable(tensor.device)
