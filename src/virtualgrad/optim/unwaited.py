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
from virtualgrad.native import built
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.base import TakeBack
from virtualgrad.operators.guard import Guard, may_guard
from virtualgrad.optim.gradients import GroupGradients, names_of

BuffersOf = Callable[[GroupGradients], Sequence[Tensor] | None]


class Last(NamedTuple):
    """What was looked at in the last step, in this order; names are made if they are asked for.

    Attributes:
        owners: parameter groups, and those of their parameters that had a gradient.
        sites: keys of the sites that were reached.
        counting: keys of the sites that tell of second passes through a graph.
        order: the place of the tensor behind each number of the answer.
        take_back: what the host has noted of the commit.
    """

    owners: Sequence[tuple[dict[str, Any], Sequence[Tensor]]]
    sites: Sequence[str]
    counting: Sequence[str]
    order: Sequence[int]
    take_back: TakeBack


class Found(NamedTuple):
    """What a step has met: sites with a NaN or infinite g, or else the first such parameter.

    Attributes:
        places: their names.
        second_passes: sites that a second pass through a compiled graph has reached.
    """

    places: Sequence[str]
    second_passes: Sequence[str]


class Unwaited:
    """The steps of one optimizer, and what the last of them has met, while nobody has asked.

    Attributes:
        skips: whether nobody wants to be told of a step that was not made.
    """

    def __init__(self) -> None:
        self.skips = False
        self._guard: Guard | None = None
        self._last: Last | None = None

    def step(
        self, gradients: Sequence[GroupGradients], operator: StatefulOperator, buffers_of: BuffersOf
    ) -> bool:
        """Make a step, if all of it is finite; False, and nothing was done, if it must wait.

        Args:
            gradients: of all groups.
            operator: T, with what backward passes have brought to it.
            buffers_of: the buffers of momentum of a group's parameters; None if some are missing.
        """
        if not gradients or not _may_be_unwaited(gradients):
            return False
        device = gradients[0].params[0].device
        if self._guard is None or self._guard.device != device:
            self._guard = Guard(device)
        self._guard.begin()
        try:
            return self._step(self._guard, gradients, operator, buffers_of)
        finally:
            self._guard.end()  # or the gradients would live until the next step

    def _step(
        self,
        guard: Guard,
        gradients: Sequence[GroupGradients],
        operator: StatefulOperator,
        buffers_of: BuffersOf,
    ) -> bool:
        commit = operator.guarded_commit(guard)
        if commit is None:
            return False
        descents = []
        for each in gradients:
            buffers = buffers_of(each)
            if buffers is None:
                return False
            descents.append(guard.will_descend(each.params, each.grads, buffers))
        witnesses, counts = operator.witnesses(), operator.counts()
        looked_at = guard.will_look(
            [
                *(grad for each in gradients for grad in each.grads),
                *(tensor for _, tensor in witnesses),
                *(tensor for _, tensor in counts),
            ]
        )
        needed = [*looked_at.tables, *(descent.table for descent in descents)]
        if not guard.send() or not all(map(guard.takes, needed)):
            return False
        guard.look(looked_at)
        for each, descent in zip(gradients, descents, strict=True):
            group = each.group
            guard.descend(
                descent,
                lr=group["lr"],
                momentum=group["momentum"],
                weight_decay=group["weight_decay"],
            )
        take_back = commit()
        owners = [(each.group, each.params) for each in gradients]  # not the gradients
        sites, counting = [key for key, _ in witnesses], [key for key, _ in counts]
        self._last = Last(owners, sites, counting, looked_at.order, take_back)
        guard.learn()
        return True

    def step_again(self, groups: list[dict[str, Any]], operator: StatefulOperator) -> bool:
        """Make a step by C++ as one was made before; False, and nothing was done, if it cannot.

        Args:
            groups: of parameters.
            operator: T, with what backward passes have brought to it.
        """
        guard = self._guard
        if guard is None:
            return False
        guard.is_new = False
        if torch.compiler.is_compiling() or built() is None or is_capturing():
            return False
        sites = operator.plain_sites()
        made = None if sites is None else guard.step_again(groups, sites)
        if made is None:
            return False
        owners, keys, counting, new, compiled, looked_at = made
        operator.note_commit(compiled)

        def take_back() -> None:
            for site in new:
                site.committed = False

        self._last = Last(owners, keys, counting, range(looked_at), take_back)
        return True

    def settle(self) -> Found | None:
        """Wait for the last step; what it has met, and was not made for, if that is to be told."""
        last, guard = self._last, self._guard
        if last is None or guard is None or is_capturing():  # who captures a graph cannot wait
            return None
        self._last = None
        guard.wait()
        met = sorted(last.order[number] for number in guard.met())
        if not met:
            return None
        last.take_back()
        params = [name for group, some in last.owners for name in names_of(group, some)]
        names = [*params, *last.sites, *last.counting]
        counting = len(params) + len(last.sites)
        sites = [names[place] for place in met if len(params) <= place < counting]
        second = [names[place] for place in met if place >= counting]
        return None if self.skips and not second else Found(sites or [names[met[0]]], second)

    def forget(self) -> None:
        """What the last step has met does not matter any more."""
        self._last = None


def _may_be_unwaited(gradients: Sequence[GroupGradients]) -> bool:
    """Whether a step is of the kind that a GPU can make alone."""
    if torch.compiler.is_compiling() or not may_guard(gradients[0].params[0]):
        return False
    return not any(each.has_sparse or isinstance(each.group["lr"], Tensor) for each in gradients)


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
