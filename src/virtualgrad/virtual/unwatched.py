"""Encapsulation 1, layers that the interception need not see: they run with mode and marks off.

Which they are :mod:`.leaves` knows, how they ran before :mod:`.memories`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import (
    DisableTorchFunctionSubclass,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

from virtualgrad.virtual.leaves import (
    BareLeaf,
    Leaf,
    bare_leaf_of,
    is_called_plainly,
    may_skip_calls,
)
from virtualgrad.virtual.memories import Memories
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.passes import Passes
from virtualgrad.virtual.remembered import Layer, LeftOut
from virtualgrad.virtual.watching import Watching

if TYPE_CHECKING:
    from virtualgrad.virtual.attached_class import Bound


class Unwatched(Watching):
    """An interception that layers of torch.nn can do without.

    Args:
        tracked: the tracked parameters.
        passes: the passes of the model.
        batch_dim: the axis of the inputs that counts samples.
    """

    def __init__(self, tracked: TrackedParameters, passes: Passes, batch_dim: int) -> None:
        super().__init__(tracked, passes, batch_dim)
        self._memories = Memories(tracked)

    def memory_of(self, leaf: Leaf, path: str, module: nn.Module) -> LeftOut | Layer | None:
        """How a layer was run, if it was run before."""
        weight = module._parameters.get("weight")
        return self._memories.layers.get((leaf.function, path, id(weight)))

    def forget_layers(self) -> None:
        """Forget how layers were run: parameters have come, or they are let go."""
        self._memories.clear()
        self.in_cpp.clear()

    def run_leaf(self, leaf: Leaf, path: str, forward: Any, module: nn.Module, x: Any) -> Any:
        """Run a layer of torch.nn as it was run before, unwatched; None if it has to be watched.

        That is also the case where another mode is on: it wants to see the op, too. A layer that
        is called by itself, outside of the model, begins a pass.
        """
        if self.path is None or not self._is_activation(x) or not leaf.is_all_of(module):
            return None
        memory = self.memory_of(leaf, path, module)
        if memory is None:
            return None
        if self._marks.are_on:
            if _len_torch_function_stack() != 0 or not self._marks.are_of_this_thread:
                return None
            with DisableTorchFunctionSubclass():
                return self._run_again(leaf, memory, forward, module, x)
        if _len_torch_function_stack() != 1:
            return None
        mode = _pop_torch_function_stack()
        try:
            return self._run_again(leaf, memory, forward, module, x) if mode is self else None
        finally:
            _push_on_torch_function_stack(mode)

    def _run_again(
        self, leaf: Leaf, memory: LeftOut | Layer, forward: Any, module: nn.Module, x: Tensor
    ) -> Any:
        """Run a layer as it was run before, with neither mode nor marks; None if that was other."""
        current = self.passes.current
        if isinstance(memory, LeftOut):
            return forward(module, x) if memory.counts_for(module, current) else None
        behind = None if leaf.behind_input is None else leaf.behind_input(module)
        if behind is None:
            return None
        sigma = memory.run_again(behind, x, current, self.batch_dim)
        if sigma is not None and leaf.count is not None:
            leaf.count(module)
        return sigma

    def run_sequence(self, bound: Mapping[int, Bound], sequence: nn.Sequential, x: Any) -> Any:
        """Run the modules of an nn.Sequential; layers of torch.nn go straight to their forward.

        Args:
            bound: id of a module -> what is known of it, for all that have parameters.
            sequence: the modules.
            x: the input of the first.
        """
        may_skip = not self.sees_all_ops and not self.is_sharded
        for module in sequence:
            done = None
            if may_skip and may_skip_calls():  # others may have come since the last module
                done = self._run_forward(bound, module, x)
            x = module(x) if done is None else done
        return x

    def _run_forward(self, bound: Mapping[int, Bound], module: nn.Module, x: Any) -> Any:
        """Run a layer of torch.nn by its forward, with the interception off.

        None for any other module, and for a layer that has to be called.
        """
        if not self._is_activation(x) or not torch.is_grad_enabled():
            return None
        known = bound.get(id(module))
        if known is None:
            leaf = bare_leaf_of(module)
            return None if leaf is None else self._run_bare(leaf, module, x)
        if known.leaf is None or type(module) is not known.kind or known.module is not module:
            return None  # no layer of torch.nn, or a second optimizer has its parameters, too
        if known.kind.forward is not known.run or not is_called_plainly(module):
            return None
        return self.run_leaf(known.leaf, known.path, known.leaf.forward, module, x)

    def _run_bare(self, leaf: BareLeaf, module: nn.Module, x: Tensor) -> Any:
        """Run a layer without parameters with the interception off; None if others watch, too."""
        if self._marks.are_on:
            return leaf.forward(module, x)
        if _len_torch_function_stack() != 1:
            return None
        mode = _pop_torch_function_stack()
        try:
            return leaf.forward(module, x) if mode is self else None
        finally:
            _push_on_torch_function_stack(mode)

    def _is_activation(self, x: Any) -> bool:
        """Whether an input is a plain tensor, and no parameter in another guise."""
        views = self.tracked.views
        return type(x) is Tensor and not (views and id(x) in views)
