"""Encapsulation 1, the short way: run a layer again as it was run before.

What an op with parameters means (which sites it makes, their layout, their T) is found once per
layer and situation. As long as nothing that it depends on has changed, later passes go straight to
the op: a few comparisons instead of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad.operators import Operator
from virtualgrad.sites import Site
from virtualgrad.virtual.ops import Transforms
from virtualgrad.virtual.tracking import Pass, Transform

Situation = tuple[Any, ...]
"""Which use of the layer in this pass, the shape and dtype of its input, the batch."""

Part = tuple[Site, Operator, tuple[str, ...]]
"""A part of a site, its operator, and the op's arguments that it serves."""


@dataclass(slots=True)
class LeftOut:
    """A layer at which T does not act: its op runs as it is.

    Attributes:
        parameters: its parameters; while all require grad, ``where`` has been asked for each.
    """

    parameters: Sequence[Tensor]

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, current: Pass, batch_dim: int
    ) -> Any:
        """Run the op; None if it has to be looked at again."""
        given = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, nn.Parameter)]
        if len(given) != len(self.parameters):
            return None
        if any(new is not old for new, old in zip(given, self.parameters, strict=True)):
            return None
        if all([parameter.requires_grad for parameter in self.parameters]):
            return func(*args, **kwargs)
        return None


@dataclass(slots=True)
class Layer:
    """A layer whose op has a Function of its own.

    Attributes:
        key: name of its sigma, without the number of the use.
        others: the op's arguments but the first, which is the input.
        wanted: which of these require grad.
        apply: runs the Function: (transforms, input) -> sigma.
        parts: situation -> parts of the site.
    """

    key: str
    others: tuple[Any, ...]
    wanted: tuple[bool, ...]
    apply: Callable[[Transforms, Tensor], Tensor]
    parts: dict[Situation, list[Part]] = field(default_factory=dict)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, current: Pass, batch_dim: int
    ) -> Tensor | None:
        """Run the op; None if it has to be looked at again."""
        if kwargs or not self.is_same(args):
            return None
        x = args[0]
        if isinstance(x, nn.Parameter):
            return None
        number = current.uses.get(self.key, 0)
        parts = self.parts.get((number, x.shape, x.dtype, current.batch_size, batch_dim))
        if parts is None or torch._C._are_functorch_transforms_active():
            return None
        current.uses[self.key] = number + 1
        transforms: Transforms = {}
        for site, operator, arguments in parts:
            transform = Transform(operator, site, current)
            for argument in arguments:
                transforms[argument] = transform
        return self.apply(transforms, x)

    def is_same(self, args: tuple[Any, ...]) -> bool:
        """Whether an op is called with the same parameters and options."""
        if len(args) != len(self.others) + 1:
            return False
        for new, old, wanted in zip(args[1:], self.others, self.wanted, strict=True):
            if new is not old and (isinstance(new, Tensor) or new != old):
                return False
            if isinstance(new, Tensor) and new.requires_grad is not wanted:
                return False
        return True
