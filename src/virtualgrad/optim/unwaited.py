"""Steps on a GPU for which the host does not wait: whether they are made, the GPU decides.

To know that all gradients are finite, the host would have to wait until the GPU has computed them,
and would then launch the next step to a GPU that has nothing to do. So the GPU looks, and skips the
step by itself if they are not (:mod:`virtualgrad.operators.guard`). The host asks what was found
before the next step writes anything; by then the GPU has that step's passes to work on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.compiling import is_capturing
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.guard import Descent, Guard, may_guard
from virtualgrad.optim.gradients import GroupGradients, names_of

BuffersOf = Callable[[GroupGradients], Sequence[Tensor] | None]


class LookedAt(NamedTuple):
    """What was looked at in a step, in this order; the names of it are made if they are asked for.

    Attributes:
        owners: parameter groups, and those of their parameters that had a gradient.
        sites: keys of the sites that were reached.
        counting: keys of the sites that tell of second passes through a graph.
        order: the place of the tensor behind each number of the guard.
    """

    owners: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]
    sites: Sequence[str]
    counting: Sequence[str]
    order: Sequence[int]


class Found(NamedTuple):
    """What a step has met: sites with a NaN or infinite g, or else the first such parameter.

    Attributes:
        places: their names.
        second_passes: sites that a second pass through a compiled graph has reached.
    """

    places: Sequence[str]
    second_passes: Sequence[str]


class Unwaited:
    """The steps of one optimizer, and what the last of them has met, while nobody has asked."""

    def __init__(self) -> None:
        self._guard: Guard | None = None
        self._last: LookedAt | None = None
        self._answer: Tensor | None = None
        self._event: Any = None

    def step(
        self, gradients: Sequence[GroupGradients], operator: StatefulOperator, buffers_of: BuffersOf
    ) -> bool:
        """Make a step, if all of it is finite; False, and nothing was done, if it must wait.

        Args:
            gradients: of all groups.
            operator: T, with what backward passes have brought to it.
            buffers_of: the buffers of momentum of a group's parameters; None if some are missing.
        """
        if not gradients or not operator.takes_guard or not _may_be_unwaited(gradients):
            return False
        guard = self._guard
        if guard is None or guard.device != gradients[0].params[0].device:
            guard = self._guard = Guard(gradients[0].params[0])
        descents = []
        for each in gradients:
            buffers = buffers_of(each)
            descent = None if buffers is None else guard.descent(each.params, each.grads, buffers)
            if descent is None:
                return False
            descents.append(descent)
        witnesses, counts = operator.witnesses(), operator.counts()
        grads = [grad for each in gradients for grad in each.grads]
        looked_at = guard.tables_of(
            [*grads, *(tensor for _, tensor in witnesses), *(tensor for _, tensor in counts)]
        )
        if looked_at is None:
            return False
        order = guard.look(looked_at)
        for each, descent in zip(gradients, descents, strict=True):
            _descend(guard, each, descent)
        operator.commit_unless(guard)
        owners = [(each.group, each.params) for each in gradients]  # not the gradients
        sites, counting = [key for key, _ in witnesses], [key for key, _ in counts]
        self._last = LookedAt(owners, sites, counting, order)
        self._ask(guard.found)
        return True

    def _ask(self, found: Tensor) -> None:
        """Have the answer brought to the host, which does not wait for it."""
        if not found.is_cuda:  # Triton's interpreter
            self._answer = found.clone()
            return
        if self._answer is None or self._answer.numel() != found.numel():
            self._answer = torch.empty(found.numel(), pin_memory=True)
        self._answer.copy_(found, non_blocking=True)
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(found.device))

    def settle(self) -> Found | None:
        """Wait for the last step; what it has met, and so was not made for; None: nothing."""
        last, guard = self._last, self._guard
        if last is None or guard is None or is_capturing():  # who captures a graph cannot wait
            return None
        self._last = None
        assert self._answer is not None
        if self._event is not None:
            self._event.synchronize()
        if float(self._answer[0]) != guard.step:
            return None
        numbers = self._answer[1:].tolist()
        guard.reset()
        met = sorted(p for p, n in zip(last.order, numbers, strict=False) if n == guard.step)
        params = [name for group, some in last.owners for name in names_of(group, some)]
        names = [*params, *last.sites, *last.counting]
        counting = len(params) + len(last.sites)
        sites = [names[place] for place in met if len(params) <= place < counting]
        second = [names[place] for place in met if place >= counting]
        return Found(sites or [names[met[0]]], second)

    def forget(self) -> None:
        """What the last step has met does not matter any more."""
        self._last = None
        if self._guard is not None:
            self._guard.reset()


def _may_be_unwaited(gradients: Sequence[GroupGradients]) -> bool:
    """Whether a step is of the kind that a GPU can make alone."""
    if torch.compiler.is_compiling() or not may_guard(gradients[0].params[0]):
        return False
    return not any(each.has_sparse or isinstance(each.group["lr"], Tensor) for each in gradients)


def _descend(guard: Guard, gradients: GroupGradients, descent: Descent) -> None:
    group = gradients.group
    numbers = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
    guard.descend(descent, **numbers)


def warn_at_the_end(optimizer: object, unwaited: Unwaited) -> None:
    """Have it told if the last step of an optimizer was not made, and nobody has asked."""
    weakref.finalize(optimizer, _warn, unwaited)


def _warn(unwaited: Unwaited) -> None:
    found = unwaited.settle()
    if found is not None:
        warnings.warn(
            f"the last step of an optimizer was not made: a NaN or infinite gradient at "
            f"{(*found.places, *found.second_passes)[0]}; parameters and state are as they were "
            "before it. Call optimizer.settle() behind the last step to have an error in its place",
            stacklevel=2,
        )
