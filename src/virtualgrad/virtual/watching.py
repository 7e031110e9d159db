"""Encapsulation 1, how ops come to the interception: by marks, or by its torch function mode.

In an eager pass the mode is off as a rule, and parameters are marked (:mod:`.marks`), so that only
ops that take one come by. The mode is on where that would not do: in the first pass, in compiled
ones, and as long as code has a view of a parameter, which has no mark.

A compiler must not meet marks. Where it comes to an eager model, for a part of it or a function
that it calls, it tells so before it looks: from then on the mode is on.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch._C import (
    DisableTorchFunctionSubclass,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from virtualgrad.virtual.marks import Marks
from virtualgrad.virtual.native_forward import InCpp
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.passes import Passes
from virtualgrad.virtual.refusals import refuse_late_compilation


class Watching(TorchFunctionMode):
    """A torch function mode that is on where marks on parameters would not do.

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
        in_cpp: the modules that C++ runs in such a pass.
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
        self.in_cpp = InCpp()
        self._marks = Marks(tracked.all, self._meet)
        self._is_first = True  # the pass to come
        self._is_by_marks = False  # the pass that runs, as long as marks do
        self._meets = False  # whether an op with a marked parameter runs

    def run_pass(
        self, forward: Any, module: nn.Module, args: Any, kwargs: Any, *, by_marks: bool
    ) -> Any:
        """Run an eager pass, that of the module with which it begins, by marks if it may be."""
        _ask_compilers()
        passes = _passes.here
        passes.append(self)
        try:
            if not (by_marks and self._mark()):
                with self:
                    return forward(module, *args, **kwargs)
            return forward(module, *args, **kwargs)
        finally:
            passes.pop()
            if self._is_by_marks:
                self._unmark()

    def _mark(self) -> bool:
        """Begin a pass that needs no mode: mark the parameters; False where it needs one.

        The first pass has it on: what is compiled in the model is compiled then, and tensors whose
        classes want to be asked at ops, too, and need not know what to make of marks, are met.
        """
        is_first, self._is_first = self._is_first, False
        if is_first or self._needs_mode() or torch._C._get_tracing_state() is not None:
            return False
        if _len_torch_function_stack() or not torch._C._is_torch_function_enabled():
            return False  # others watch, or what asks the arguments of ops is switched off
        self._is_by_marks = True  # whatever breaks in on the way: marks are taken off then
        self._is_by_marks = self._put_marks_on()
        return self._is_by_marks

    def _needs_mode(self) -> bool:
        """Whether passes cannot do with marks alone, whatever comes in them."""
        wants_mode = self.is_sharded or self.sees_all_ops or self.is_shared
        return wants_mode or self.was_compiled or self.has_met_classes

    def _put_marks_on(self) -> bool:
        if not self._marks.put_on():
            return False
        self.in_cpp.begin(self.passes.current, self.batch_dim)
        return True

    def _take_marks_off(self) -> None:
        self._marks.take_off()
        self.in_cpp.end()

    def _unmark(self) -> None:
        """End a pass by marks."""
        self._is_by_marks = False
        if self._marks.are_on:
            self._take_marks_off()
        elif self._is_in_stack():
            _take_out(self)

    def look_again(self) -> None:
        """At the beginning of a module: mark parameters again if no view of them is left."""
        if not self._is_by_marks or self._marks.are_on or self._needs_mode():
            return
        if not self._is_in_stack() or torch._C._current_graph_task_id() != -1:
            return  # in an op that the mode has met, or what a backward pass runs again in it
        if not self.tracked.has_living_views() and self._put_marks_on():
            _take_out(self)

    def is_on(self) -> bool:
        """Whether ops are seen now, by marks or by the mode."""
        return self._marks.are_on or self._is_in_stack()

    def _is_in_stack(self) -> bool:
        return any([mode is self for mode in _get_current_function_mode_stack()])

    @property
    def has_marks_on(self) -> bool:
        """Whether parameters are marked now."""
        return self._marks.are_on

    def _meet(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that takes a marked parameter."""
        if is_compiling():
            refuse_late_compilation()
        if self._marks.have_company(types):  # which wants to be asked, too
            others = _passes.here if self._marks.are_several(types) else [self]
            for watching in reversed(others):  # each gets below those before it
                watching.meet_classes()
            return func(*args, **kwargs)
        self._meets = True
        try:
            with DisableTorchFunctionSubclass():
                return self.__torch_function__(func, (), args, kwargs)
        finally:
            self._meets = False
            if self.tracked.views or not self._marks.are_on:  # views, or a compiler in the op
                self._watch()

    def _watch(self) -> None:
        """Put the mode on in place of the marks, where it were if it had been on from the start."""
        if self._marks.are_on:
            self._take_marks_off()
        if not self._meets:  # of what an op calls the mode does not hear, either
            modes = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
            for mode in (self, *reversed(modes)):
                _push_on_torch_function_stack(mode)

    def meet_compiler(self) -> None:
        """Do without marks, in this pass and all others: a compiler has come to it."""
        self.was_compiled = True
        if self._marks.are_on:
            self._watch()

    def meet_classes(self) -> None:
        """Do without marks: there are tensors that want to see ops, too."""
        self.has_met_classes = True
        if self._marks.are_on:
            self._watch()


class _Passes(threading.local):
    """The interceptions whose eager passes run in this thread, the last one inside the others."""

    def __init__(self) -> None:
        self.here: list[Watching] = []


_passes = _Passes()


def _ask_compilers() -> None:
    """Ask torch.compile, as soon as it is there, to tell us when it begins."""
    told = sys.modules.get("torch._dynamo.callback")
    if told is not None and _compiler_begins not in told.callback_handler.start_callbacks:
        told.on_compile_start(_compiler_begins)


def _compiler_begins(about: Any) -> None:
    if about.callback_trigger.name == "DYNAMO":  # a frame is to be traced
        for watching in _passes.here:
            watching.meet_compiler()


def _take_out(mode: TorchFunctionMode) -> None:
    """Take a mode off, also from under others that were put on since."""
    above: list[Any] = []
    while (last := _pop_torch_function_stack()) is not mode:
        above.append(last)
    for other in reversed(above):
        _push_on_torch_function_stack(other)
