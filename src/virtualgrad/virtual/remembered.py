"""Encapsulation 1, the short way: run a layer again as it was run before.

What an op with parameters means (which sites it makes, their layout, their T) is found once per
layer and situation. As long as nothing that it depends on has changed, later passes go straight to
the op: a few comparisons instead of a search.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad.operators import Operator
from virtualgrad.sites import Site
from virtualgrad.virtual.ops import Transforms
from virtualgrad.virtual.tracking import Pass, Transform

Place = int | str
"""Of an argument: its position or its name."""

Situation = tuple[Any, ...]
"""Which use of the layer in this pass, the shapes of weight and input, its dtype, the batch."""

Part = tuple[Site, Operator, tuple[str, ...]]
"""A part of a site, its operator, and the op's arguments that it serves."""


@dataclass(slots=True)
class LeftOut:
    """A layer at which T does not act: its op runs as it is.

    Attributes:
        key: name of its sigma, without the number of the use.
        parameters: (place, parameter) of all that are tracked; while all require grad, ``where``
            has been asked for each.
        names: of tracked parameters, by their ids.
        weight, bias: of the op, as far as it has any.
        numbers: the uses for which ``where`` has been asked; another one may be chosen.
    """

    key: str
    parameters: Sequence[tuple[Place, Tensor]]
    names: Mapping[int, str]
    weight: Tensor | None = None
    bias: Tensor | None = None
    numbers: set[int] = field(default_factory=set)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, current: Pass, batch_dim: int
    ) -> Any:
        """Run the op; None if it has to be looked at again."""
        number = current.uses.get(self.key, 0)
        if number not in self.numbers or not self.is_same(args, kwargs):
            return None
        current.uses[self.key] = number + 1
        return func(*args, **kwargs)

    def counts_for(self, module: nn.Module, current: Pass) -> bool:
        """Whether a module with this op and no other is left out still, and count the use."""
        weight, bias, parameters = self.weight, self.bias, module._parameters
        if parameters["weight"] is not weight or parameters["bias"] is not bias:
            return False
        if weight is None or not (weight.requires_grad and (bias is None or bias.requires_grad)):
            return False
        number = current.uses.get(self.key, 0)
        if number not in self.numbers:
            return False
        current.uses[self.key] = number + 1
        return True

    def is_same(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether an op is called with the same parameters, and no other ones."""
        for place, parameter in self.parameters:
            if argument(place, args, kwargs) is not parameter or not parameter.requires_grad:
                return False
        tracked = [value for value in (*args, *kwargs.values()) if id(value) in self.names]
        return len(tracked) == len(self.parameters)


@dataclass(slots=True)
class Layer:
    """A layer whose op has a Function of its own.

    Attributes:
        key: name of its sigma, without the number of the use.
        tensors: (place, tensor, whether it requires grad) of the op's arguments but the first,
            which is the input.
        options: (place, value) of the others.
        apply: runs the Function: (transforms, input) -> sigma.
        weight: among the tensors; through ``.data`` its shape may change, and sigma's with it.
        parts: situation -> parts of the site.
        behind_input: all arguments but the first, in order.
    """

    key: str
    tensors: tuple[tuple[Place, Tensor, bool], ...]
    options: tuple[tuple[Place, Any], ...]
    apply: Callable[[Transforms, Tensor], Tensor]
    weight: Tensor
    behind_input: tuple[Any, ...]
    parts: dict[Situation, list[Part]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, key: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], apply: Any, weight: Tensor
    ) -> Layer:
        """The layer of a call."""
        others = behind_input(args, kwargs)
        tensors = [(at, t, t.requires_grad) for at, t in others if isinstance(t, Tensor)]
        options = [(at, value) for at, value in others if not isinstance(value, Tensor)]
        behind = tuple(value for _, value in others)
        return cls(key, tuple(tensors), tuple(options), apply, weight, behind)

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, current: Pass, batch_dim: int
    ) -> Tensor | None:
        """Run the op; None if it has to be looked at again."""
        if not self.is_same(args, kwargs):
            return None
        x = args[0]
        if type(x) is not Tensor and isinstance(x, nn.Parameter):  # a question with a long answer
            return None
        return self._run(x, current, batch_dim)

    def run_again(
        self, behind_input: tuple[Any, ...], x: Tensor, current: Pass, batch_dim: int
    ) -> Tensor | None:
        """Run the op of a layer of torch.nn; None if not all is the very same behind its input."""
        if len(behind_input) != len(self.behind_input):
            return None
        if not all(map(operator.is_, behind_input, self.behind_input)):
            return None
        for _, tensor, wanted in self.tensors:
            if tensor.requires_grad is not wanted:
                return None
        return self._run(x, current, batch_dim)

    def _run(self, x: Tensor, current: Pass, batch_dim: int) -> Tensor | None:
        """Run the op on an input, if this was its situation before."""
        number = current.uses.get(self.key, 0)
        situation = (number, self.weight.shape, x.shape, x.dtype, current.batch_size, batch_dim)
        parts = self.parts.get(situation)
        if parts is None or torch._C._are_functorch_transforms_active():
            return None
        current.uses[self.key] = number + 1
        transforms: Transforms = {}
        for site, acting, arguments in parts:
            transform = Transform(acting, site, current)
            for argument in arguments:
                transforms[argument] = transform
        return self.apply(transforms, x)

    def is_same(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether an op is called with the same parameters and options."""
        if not args or len(args) + len(kwargs) != 1 + len(self.tensors) + len(self.options):
            return False
        for place, tensor, wanted in self.tensors:
            given = argument(place, args, kwargs)
            if given is not tensor or tensor.requires_grad is not wanted:
                return False
        for place, option in self.options:
            given = argument(place, args, kwargs)
            if given is not option and (isinstance(given, Tensor) or given != option):
                return False
        return True


def argument(place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument in a place of a call; None if there is none."""
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def behind_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Place, Any]]:
    """(Place, argument) of all arguments but the first."""
    return [*list(enumerate(args))[1:], *kwargs.items()]
