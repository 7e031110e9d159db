"""What a step writes on a GPU, unless a number in it is not finite: nobody waits to know.

    look at all gradients and statistics  ->  flag,     write parameters and r unless the flag is up

The host launches both, and goes on to the next step; it reads the answer when that is launched.
:mod:`.guarded_kernel` has the kernels. A step first says what it is about to look at and to write
(:class:`~virtualgrad.operators.walks.Table`), so that addresses travel once, and only then does it.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators import kernels
from virtualgrad.operators.addresses import Addresses, on_host
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.native_launches import STREAM_ON
from virtualgrad.operators.walks import Table

DTYPE_OF = operator.attrgetter("dtype")
MOST_STEPS = 2**20
"""Steps are numbered in float32, from 1 to here and again."""


class Descent(NamedTuple):
    """The tensors of a parameter group, ready for :meth:`Guard.descend`.

    Attributes:
        table: the place of their table.
        params: the parameters.
        buffers: of momentum, or none.
    """

    table: int
    params: Sequence[Tensor]
    buffers: Sequence[Tensor]


class LookedAt(NamedTuple):
    """Tensors that are to be looked at, by dtype.

    Attributes:
        tables: the places of their tables, one for each dtype.
        order: the place of the tensor behind each number of the answer.
    """

    tables: list[int]
    order: Sequence[int]


class Guard:
    """The flag of one optimizer's steps, and what is written only where it is down.

    Args:
        device: of all tensors.

    Attributes:
        device: the same.
        flag: the number of the last step that met a NaN or an infinity.
        answer: the same for the host and, behind it, for each tensor that was looked at the number
            of the last step in which it had one. A GPU writes there only if there is something to
            tell; to be read when it is through.
        step: the number of this step.
        is_new: whether C++ was asked to make this step, and has met no other like it.
    """

    def __init__(self, device: torch.device) -> None:
        from virtualgrad.operators import guarded_kernel  # noqa: PLC0415 - Triton

        self._kernels: Any = guarded_kernel
        self.device = device
        # Whatever torch's defaults are: numbers of steps are told apart in float32.
        self.flag = torch.zeros(1, dtype=torch.float32, device=device)
        self._have_room_for(1)
        self.step = 0.0
        self.is_new = False
        self._addresses = Addresses(device)
        self._launched: list[tuple[Table, tuple[bool, ...]]] = []
        library = built() if device.type == "cuda" else None
        self._in_cpp: Any = None if library is None else library.GuardedSteps(PLAIN)
        self._end: Any = None  # an event behind what was launched last
        self._is_pending = False

    def _have_room_for(self, tensors: int) -> None:
        self.answer = on_host(tensors + 1, torch.float32, self.device)
        # reading it through torch takes ten times as long
        self._answered = ctypes.c_float.from_address(self.answer.data_ptr())

    # ------------------------------------------------------------------ what a step is about to do

    def begin(self) -> None:
        """Begin a step; the GPU is through with what it reads for the one before."""
        self.wait()
        self._addresses.forget()
        self._launched.clear()

    def end(self) -> None:
        """End what began, also where it failed; a step's tensors are let go."""
        self._addresses.forget()
        if self._is_pending and self.device.type == "cuda":
            if self._end is None:
                self._end = torch.cuda.Event()
            self._end.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait until the GPU has done what was launched."""
        if self._is_pending and self._end is not None:
            self._end.synchronize()
        self._is_pending = False

    def will_look(self, tensors: Sequence[Tensor]) -> LookedAt:
        """The tensors to be looked at."""
        ask, look = self._addresses.ask, self._kernels.look
        dtypes = list(map(DTYPE_OF, tensors))
        if len(set(dtypes)) == 1:
            return LookedAt([ask(look, [tensors])], range(len(tensors)))
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, dtype in enumerate(dtypes):
            by_dtype.setdefault(dtype, []).append(place)
        tables = [ask(look, [[tensors[place] for place in some]]) for some in by_dtype.values()]
        return LookedAt(tables, [place for places in by_dtype.values() for place in places])

    def will_descend(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Descent:
        """What :meth:`descend` takes."""
        lists = [params, grads, *([buffers] if buffers else [])]
        return Descent(self._addresses.ask(self._kernels.descend, lists), params, buffers)

    def will_update(
        self,
        means: Sequence[Tensor],
        norms: Sequence[Tensor],
        weights: Sequence[float],
        factors: Sequence[Tensor] = (),
    ) -> int | None:
        """What :meth:`update_means` takes; None if it cannot."""
        if means[0].dtype != torch.float32:
            return None
        numbers = [float(weight) for weight in weights]
        lists = [means, norms, *([factors] if factors else [])]
        return self._addresses.ask(self._kernels.update_means, lists, numbers)

    def will_exchange(self, means: Sequence[Tensor], candidates: Sequence[Tensor]) -> int:
        """What :meth:`exchange` takes."""
        return self._addresses.ask(self._kernels.exchange, [means, candidates])

    def send(self) -> bool:
        """Send the addresses of all that was announced; False if none can be taken."""
        return self._addresses.send()

    def takes(self, table: int | None) -> bool:
        """Whether a kernel takes what was announced for it, and sent."""
        return table is not None and self._addresses.tables[table] is not None

    # ------------------------------------------------------------------ and does

    def look(self, looked_at: LookedAt) -> None:
        """Look, and give the step a number."""
        if self.answer.numel() <= len(looked_at.order):
            self._have_room_for(len(looked_at.order))
        self._number()
        first = 0
        for place in looked_at.tables:
            table = self._table(place)
            table.launch(self._addresses.given, (self.flag, self.answer), (self.step, first))
            self._launched.append((table, ()))
            first += table.length

    def _number(self) -> None:
        if self.step == MOST_STEPS:  # numbers of long ago come again
            self.flag.zero_()
            self.answer.zero_()
        self.step = self.step % MOST_STEPS + 1
        self._is_pending = True

    def descend(self, descent: Descent, *, lr: float, momentum: float, weight_decay: float) -> None:
        """Decoupled weight decay and descent, as in ``optim/update.py``, to the same bits."""
        numbers = (float(1 - lr * weight_decay), float(momentum), 1.0, float(-lr))
        self._launch(descent.table, numbers, bool(weight_decay), bool(descent.buffers))
        # autograd sees that they have changed, where a graph of before this step needs them
        torch.autograd.graph.increment_version([*descent.params, *descent.buffers])

    def update_means(
        self, table: int, rho: float, factor_of: tuple[float, float] | None = None
    ) -> None:
        """New r = rho r + weight N^2, at several sites, and f = s / sqrt(r + eps), if it is made.

        Args:
            table: of them.
            rho: of them all.
            factor_of: s and eps; None where no factors were announced.
        """
        scale, eps = factor_of or (1.0, 0.0)
        numbers = (float(rho), float(eps), float(scale))
        self._launch(table, numbers, factor_of is not None)

    def exchange(self, table: int) -> None:
        """New r = candidate; where the step is not made, candidate = r."""
        self._launch(table, ())

    def choose(self, new: Tensor, old: Tensor) -> Tensor:
        """The new one where the step is made, else the old one."""
        return torch.where(self.flag[0] == self.step, old, new)

    def _table(self, place: int) -> Table:
        return cast("Table", self._addresses.tables[place])

    def _launch(self, place: int, numbers: tuple[float, ...], *options: bool) -> None:
        table = self._table(place)
        others = (self.step, *numbers, table.length)
        table.launch(self._addresses.given, (self.flag,), others, options)
        self._launched.append((table, options))

    # ------------------------------------------------------------------ the same again, in C++

    def step_again(self, groups: list[dict[str, Any]], sites: dict[str, Any]) -> Any:
        """Do all of it by C++, if a step with tensors that are laid out alike was made before.

        Args:
            groups: of parameters.
            sites: what is kept for each of them.

        Returns:
            (groups and those of their parameters that had a gradient, keys of the sites that were
            reached, and of those that count, sites that had no r before, what compiled passes keep,
            how many tensors were looked at); None, and nothing was done, where Python is to make
            the step.
        """
        self.is_new = False
        if self._in_cpp is None or self.device.index != torch.cuda.current_device():
            return None
        self.begin()
        try:
            self._number()
            room = self._addresses.staged, self._addresses.sent
            of_step = self.flag, self.answer, self.step, STREAM_ON(self.device.index)
            done = self._in_cpp.step(groups, sites, *room, *of_step)
            self._is_pending = done is not None
            self.is_new = done is None
            return done
        finally:
            self.end()

    def learn(self) -> None:
        """Have C++ do again what was launched, in steps laid out as the one that it declined."""
        is_new, self.is_new = self.is_new, False
        if not is_new:
            return
        walked = [table.in_cpp(options) for table, options in self._launched]
        if all(each is not None for each in walked):
            self._in_cpp.learn(walked, self._addresses.given is self._addresses.staged)

    # ------------------------------------------------------------------ what came of it

    def met(self) -> list[int]:
        """Which numbers of the answer tell of the last step; the GPU is through with it."""
        if self._answered.value != self.step:
            return []
        return [place for place, n in enumerate(self.answer[1:].tolist()) if n == self.step]


def may_guard(tensor: Tensor) -> bool:
    """Whether there are kernels for a step on a tensor's device."""
    return kernels.may_launch(tensor.device) and kernels.is_usable(tensor.device)
