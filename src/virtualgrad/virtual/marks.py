"""Encapsulation 1, marks: parameters that tell of themselves where an op takes them.

A torch function mode is asked at every op of a model, for the sake of the few that take a
parameter. But torch also asks the *arguments* of an op, if their class wants it. So for the time of
an eager pass tracked parameters have a class that does: an op that takes one comes here, from
wherever the code has the parameter, and all others run as if nobody looked.

The class is ``nn.Parameter`` but for that, and a copy or a pickle that is made in the middle of a
pass is a plain one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

Meet = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""(torch function, types, args, kwargs) -> result, for a function that takes a marked parameter."""

_NEW = nn.Parameter.__new__.__code__

PLAIN = {Tensor, nn.Parameter}
"""Classes of tensors that are asked for nothing."""


class Marked(nn.Parameter):
    """A parameter with a mark, of whichever model; each model has a class of its own."""


class Marks:
    """Marks on parameters.

    Args:
        parameters: those that are to be marked, asked at each pass.
        meet: runs a torch function that takes a marked parameter; those of other threads, which
            have no pass, run as they are.

    Attributes:
        are_on: whether the parameters are marked.
    """

    def __init__(self, parameters: Callable[[], Iterable[Tensor]], meet: Meet) -> None:
        self.are_on = False
        self._made: list[tuple[Any, type]] = []  # of parameters, and what they are to be
        self._kind = _marked_class(self._meet, self._made)
        self._run = meet
        self._parameters = parameters
        self._marked: Iterable[Any] = ()
        self._thread = 0

    def put_on(self) -> bool:
        """Mark the parameters, for ops of this thread.

        False, and none is marked, where they are not all torch's own: other classes have reasons.
        """
        parameters: Iterable[Any] = self._parameters()
        if not all([type(parameter) is nn.Parameter for parameter in parameters]):
            return False
        self._thread = threading.get_ident()
        self.are_on = True
        kind, self._marked = self._kind, parameters
        for parameter in parameters:
            parameter.__class__ = kind
        return True

    def take_off(self) -> None:
        """Make plain parameters of them again."""
        self.are_on = False
        for parameter in self._marked:
            parameter.__class__ = nn.Parameter
        self._marked = ()
        while self._made:
            made, kind = self._made.pop()
            made.__class__ = kind
            vars(made).pop("_is_param", None)

    @property
    def are_of_this_thread(self) -> bool:
        """Whether the pass for which they are on, if they are, runs in this thread."""
        return self._thread == threading.get_ident()

    @staticmethod
    def are_several(types: Iterable[type]) -> bool:
        """Whether there are marked parameters of several models among the types of an op."""
        return sum([issubclass(kind, Marked) for kind in types]) > 1

    def have_company(self, types: Iterable[type]) -> bool:
        """Whether there are other classes among the types of an op that want to be asked."""
        return not PLAIN.issuperset(kind for kind in types if kind is not self._kind)

    def _meet(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self.are_on or not self.are_of_this_thread:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return self._run(func, types, args, kwargs or {})


def _marked_class(meet: Callable[..., Any], made: list[tuple[Any, type]]) -> type[nn.Parameter]:
    """A class of parameters whose torch functions go to ``meet``.

    Args:
        meet: (torch function, types, args, kwargs) -> result.
        made: takes the parameters that are made of such ones, and have their class for now.
    """

    class Parameter(Marked):
        def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
            return nn.Parameter(data, requires_grad)

        def detach(self) -> Any:
            detached, caller = super().detach(), sys._getframe(1)
            if caller.f_code is not _NEW:
                return detached
            # nn.Parameter(parameter): of a class that is not its own it wants what has that class.
            detached.__class__ = type(self)
            made.append((detached, caller.f_locals["cls"]))
            return detached

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return meet(func, types, args, kwargs)

        def __deepcopy__(self, memo: Any) -> Any:  # that of nn.Parameter makes one of its class
            if id(self) not in memo:
                with DisableTorchFunctionSubclass():
                    values = self.data.clone(memory_format=torch.preserve_format)
                    memo[id(self)] = nn.Parameter(values, self.requires_grad)
            return memo[id(self)]

    Parameter.__qualname__ = nn.Parameter.__qualname__
    Parameter.__module__ = nn.Parameter.__module__
    return Parameter
