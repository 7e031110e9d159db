"""Encapsulation 1, marks: parameters that tell of themselves where an op takes them.

A torch function mode is asked at every op of a model, for the sake of the few that take a
parameter. But torch also asks the *arguments* of an op, if their class wants it. So for the time of
an eager pass tracked parameters have a class that does: an op that takes one comes here, from
wherever the code has the parameter, and all others run as if nobody looked.

The class is ``nn.Parameter`` but for that, and a copy or a pickle that is made in the middle of a
pass is a plain one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

Meet = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""(torch function, types, args, kwargs) -> result, for a function that takes a marked parameter."""

PLAIN = {Tensor, nn.Parameter}
"""Classes of tensors that are asked for nothing."""


class Marked(nn.Parameter):
    """A parameter with a mark, of whichever model; each model has a class of its own."""


class Marks:
    """Marks on parameters.

    Args:
        meet: runs a torch function that takes a marked parameter; those of other threads, which
            have no pass, run as they are.

    Attributes:
        are_on: whether the parameters are marked.
    """

    def __init__(self, meet: Meet) -> None:
        self.are_on = False
        self._kind = _marked_class(self._meet)
        self._run = meet
        self._parameters: tuple[Tensor, ...] = ()
        self._thread = 0

    def choose(self, parameters: Iterable[Tensor]) -> None:
        """Choose the parameters."""
        self._parameters = tuple(parameters)

    def put_on(self) -> bool:
        """Mark the parameters, for ops of this thread; whether all of them can be marked.

        Those of another class than torch's own have reasons for it.
        """
        if any([type(parameter) is not nn.Parameter for parameter in self._parameters]):
            return False
        self._thread = threading.get_ident()
        self.are_on = True
        kind = self._kind
        for parameter in self._parameters:
            parameter.__class__ = kind
        return True

    def take_off(self) -> None:
        """Make plain parameters of them again."""
        self.are_on = False
        for parameter in self._parameters:
            parameter.__class__ = nn.Parameter

    @property
    def are_of_this_thread(self) -> bool:
        """Whether the pass for which they are on, if they are, runs in this thread."""
        return self._thread == threading.get_ident()

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


def _marked_class(meet: Callable[..., Any]) -> type[nn.Parameter]:
    """A class of parameters whose torch functions go to ``meet``."""

    class Parameter(Marked):
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
