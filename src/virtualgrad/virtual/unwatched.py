"""Encapsulation 1, layers that the interception need not see: they run with its mode off.

Which they are :mod:`.leaves` knows, how they ran before :mod:`.memories`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode

from virtualgrad.virtual.leaves import Leaf, has_hooks_on_all, runs_unwatched
from virtualgrad.virtual.memories import Memories
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.passes import Passes
from virtualgrad.virtual.remembered import LeftOut


class Unwatched(TorchFunctionMode):
    """A torch function mode that layers of torch.nn can do without.

    Args:
        tracked: the tracked parameters.
        passes: the passes of the model.
        batch_dim: the axis of the inputs that counts samples.

    Attributes:
        path: of the module that runs; None outside of the model.
        sees_all_ops: whether it wants to see ops that meet no parameter as well.
    """

    sees_all_ops = False

    def __init__(self, tracked: TrackedParameters, passes: Passes, batch_dim: int) -> None:
        super().__init__()
        self.tracked = tracked
        self.passes = passes
        self.batch_dim = batch_dim
        self.path: str | None = None
        self._memories = Memories(tracked)

    def run_leaf(self, leaf: Leaf, path: str, forward: Any, module: nn.Module, x: Any) -> Any:
        """Run a layer of torch.nn as it was run before, unwatched; None if it has to be watched.

        That is also the case where another mode is on: it wants to see the op, too. A layer that
        is called by itself, outside of the model, begins a pass.
        """
        if self.path is None or not self._is_activation(x) or not leaf.is_all_of(module):
            return None
        weight = module._parameters["weight"]
        memory = self._memories.layers.get((leaf.function, path, id(weight)))
        if memory is None or _len_torch_function_stack() != 1:
            return None
        mode = _pop_torch_function_stack()
        try:
            if mode is not self:
                return None
            current = self.passes.current
            if type(memory) is LeftOut:
                return forward(module, x) if memory.counts_for(module, current) else None
            given = None if leaf.arguments is None else leaf.arguments(module, x)
            if given is None:
                return None
            sigma = memory.run(leaf.function, *given, current, self.batch_dim)
            if sigma is not None and leaf.count is not None:
                leaf.count(module)
            return sigma
        finally:
            _push_on_torch_function_stack(mode)

    def run_sequence(self, sequence: nn.Sequential, x: Any) -> Any:
        """Run the modules of an nn.Sequential, and unwatched those that have no parameters."""
        may_skip = not self.sees_all_ops and not has_hooks_on_all()
        for module in sequence:
            if may_skip and runs_unwatched(module) and self._is_activation(x):
                x = self._run_unwatched(module, x)
            else:
                x = module(x)
        return x

    def _run_unwatched(self, module: nn.Module, x: Tensor) -> Any:
        """Run a module with the interception off, unless another mode is on, too."""
        if _len_torch_function_stack() != 1:
            return module(x)
        mode = _pop_torch_function_stack()
        try:
            if mode is self:
                return module(x)
        finally:
            _push_on_torch_function_stack(mode)
        return module(x)

    def _is_activation(self, x: Any) -> bool:
        """Whether an input is a plain tensor, and no parameter in another guise."""
        views = self.tracked.views
        return type(x) is Tensor and not (views and id(x) in views)
