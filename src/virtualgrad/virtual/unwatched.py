"""Encapsulation 1, what the interception need not see.

Ops without parameters: in an eager pass its mode is off as a rule, and parameters are marked
(:mod:`.marks`), so that only ops that take one come by. The mode is on where that would not do:
in the first pass, in compiled ones, and as long as there are views of parameters, which have no
mark. And layers of torch.nn run as they ran before: which :mod:`.leaves` knows, how
:mod:`.memories`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import (
    DisableTorchFunctionSubclass,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode

from virtualgrad.native import built
from virtualgrad.virtual.leaves import (
    BareLeaf,
    Leaf,
    bare_leaf_of,
    is_called_plainly,
    may_skip_calls,
)
from virtualgrad.virtual.marks import Marks
from virtualgrad.virtual.memories import Memories
from virtualgrad.virtual.native_forward import known_module
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.passes import Passes
from virtualgrad.virtual.refusals import refuse_late_compilation
from virtualgrad.virtual.remembered import Layer, LeftOut

if TYPE_CHECKING:
    from virtualgrad.virtual.attached_class import Bound


class Unwatched(TorchFunctionMode):
    """A torch function mode that layers of torch.nn can do without.

    Args:
        tracked: the tracked parameters.
        passes: the passes of the model.
        batch_dim: the axis of the inputs that counts samples.

    Attributes:
        path: of the module that runs; None outside of the model.
        is_sharded: whether tensors have to be met before they are known by a name (FSDP).
        sees_all_ops: whether it wants to see ops that meet no parameter as well.
        is_shared: whether a second optimizer has parameters of the same model.
        was_compiled: whether a part of the model was: a compiler must not meet marks.
        has_met_classes: whether there were tensors with a torch function of their own.
        is_by_marks: whether the pass that runs is one by marks.
    """

    is_sharded = False
    sees_all_ops = False
    is_shared = False
    was_compiled = False
    has_met_classes = False

    def __init__(self, tracked: TrackedParameters, passes: Passes, batch_dim: int) -> None:
        super().__init__()
        self.tracked = tracked
        self.passes = passes
        self.batch_dim = batch_dim
        self.path: str | None = None
        self._memories = Memories(tracked)
        self._marks = Marks(self._meet)
        self._is_first = True  # the pass to come
        self._known: Any = None  # of C++, where it was built
        self._learned: dict[int, tuple[LeftOut | Layer | None, int]] = {}  # module -> how it ran
        self.run_known: Callable[[nn.Module, Any], Any] | None = None  # as they are run there
        self.is_by_marks = False
        self._modes_around = 0  # that pass

    # ---------------------------------------------------------------- by marks, or by the mode

    def mark(self) -> bool:
        """Begin an eager pass that needs no mode: mark the parameters; False where it needs one.

        The first pass has it on: what is compiled in the model is compiled then, and tensors whose
        classes want to be asked at ops, too, and need not know what to make of marks, are met.
        """
        is_first, self._is_first = self._is_first, False
        if is_first or self.is_sharded or self.sees_all_ops:
            return False
        if self.was_compiled or self.is_shared or self.has_met_classes:
            return False
        if torch._C._get_tracing_state() or not self._put_marks_on():
            return False
        self.is_by_marks = True
        self._modes_around = _len_torch_function_stack()
        return True

    def _put_marks_on(self) -> bool:
        if not self._marks.put_on():
            return False
        if self._known is not None:
            current = self.passes.current
            self._known.begin(current, current.batch_size, self.batch_dim)
        return True

    def _take_marks_off(self) -> None:
        self._marks.take_off()
        if self._known is not None:
            self._known.end()

    def unmark(self) -> None:
        """End a pass by marks."""
        self.is_by_marks = False
        if self._marks.are_on:
            self._take_marks_off()
        else:
            _take_out(self)

    def look_again(self) -> None:
        """At the beginning of a module: mark parameters again if no view of them is left."""
        if self.is_by_marks and not self._marks.are_on and not self.tracked.has_living_views():
            _take_out(self)
            self._put_marks_on()

    def _meet(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that takes a marked parameter."""
        if torch.compiler.is_compiling():
            refuse_late_compilation()
        if self._marks.have_company(types):  # which wants to be asked, too
            self.has_met_classes = True
            self._watch()
            return func(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            result = self.__torch_function__(func, (), args, kwargs)
        if self.tracked.views:
            self._watch()
        return result

    def _watch(self) -> None:
        """Put the mode on in place of the marks, where it were if it had been on from the start."""
        if self._marks.are_on:
            self._take_marks_off()
            above = _len_torch_function_stack() - self._modes_around
            modes = [_pop_torch_function_stack() for _ in range(above)]
            for mode in (self, *reversed(modes)):
                _push_on_torch_function_stack(mode)

    # ---------------------------------------------------------------- layers of torch.nn

    def learn(self, bound: Bound, base: type[nn.Module], method: str) -> None:
        """Have C++ run a module from now on as it was run just now, where it was built.

        Args:
            bound: the module.
            base, method: its class, as it was before, and what runs it there.
        """
        memory, runs, module = None, 0, bound.module
        if bound.leaf is not None:
            weight = module._parameters.get("weight")
            memory = self._memories.layers.get((bound.leaf.function, bound.path, id(weight)))
            if memory is None:
                return
            runs = len(memory.numbers if isinstance(memory, LeftOut) else memory.parts)
        learned = self._learned.get(id(module))
        is_learned = learned is not None and learned[0] is memory and learned[1] == runs
        if is_learned or self.is_shared:
            return
        library = built()
        if library is None:
            return
        self._learned[id(module)] = memory, runs
        if self._known is None:
            self._known = library.KnownModules()
            self.run_known = self._known.run
        with DisableTorchFunctionSubclass():
            known = known_module(library, self._known, bound, base, method, memory, self)
        if known is not None:
            known.came_by(bound.kind, bound.run)
            self._known.put(module, known)

    def forget_layers(self) -> None:
        """Forget how layers were run: parameters have come, or they are let go."""
        self._memories.clear()
        self._learned.clear()
        if self._known is not None:
            self._known.clear()

    def run_leaf(self, leaf: Leaf, path: str, forward: Any, module: nn.Module, x: Any) -> Any:
        """Run a layer of torch.nn as it was run before, unwatched; None if it has to be watched.

        That is also the case where another mode is on: it wants to see the op, too. A layer that
        is called by itself, outside of the model, begins a pass.
        """
        if self.path is None or not self._is_activation(x) or not leaf.is_all_of(module):
            return None
        weight = module._parameters["weight"]
        memory = self._memories.layers.get((leaf.function, path, id(weight)))
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


def _take_out(mode: TorchFunctionMode) -> None:
    """Take a mode off, also from under others that were put on since."""
    above: list[Any] = []
    while (last := _pop_torch_function_stack()) is not mode:
        above.append(last)
    for other in reversed(above):
        _push_on_torch_function_stack(other)
