"""Encapsulation 1, checkpoints: what a backward pass runs again is watched as it was before.

A module that is run again watches itself. But a module may checkpoint a method of its own, or any
function, with ops on parameters in it:

    checkpoint(lambda h: h @ self.embedding.weight.t(), h)

Run again outside of every module, these ops would go unnoticed: they would save other tensors than
before, which torch refuses, or, under a reentrant checkpoint, have the plain gradient. So where
such an op comes by in a forward pass, the checkpoints in which it runs are looked for among its
callers, and told to run their function as a part of the module that called them.

Torch has no public way to tell a checkpoint that. Where its insides are other ones, nothing is
found, and all is as if nobody had looked.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

if TYPE_CHECKING:
    from virtualgrad.virtual.attach import Attachment

_REENTRANT: CodeType = CheckpointFunction.forward.__code__
_NOT_REENTRANT: CodeType = inspect.unwrap(checkpoint).__code__
_runs_module: list[CodeType] = []


Method = TypeVar("Method", bound=Callable[..., Any])


def runs_modules(method: Method) -> Method:
    """Take a method of an attachment for the one that runs a module; it is as it was."""
    _runs_module.append(method.__code__)
    return method


def may_be_in_checkpoint(records: bool) -> bool:
    """Whether an op may run in a checkpoint; made for speed, as it is asked at every op of ours.

    Args:
        records: whether the pass began with gradients enabled; reentrant checkpoints disable them.
    """
    if not is_grad_enabled():
        return records
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def watch_checkpoints() -> None:
    """Have the checkpoints in which an op runs, but not all of its module, watch as they rerun.

    Several optimizers run a module one inside the other; they do so in the same order again.
    """
    checkpoints: list[FrameType] = []
    module = None
    for frame in _callers():
        if frame.f_code in _runs_module:
            runs = frame.f_locals
            if module is not None and runs["module"] is not module:
                return
            module = runs["module"]
            for each in checkpoints:
                _watch(each, runs)
        elif frame.f_code is _REENTRANT or frame.f_code is _NOT_REENTRANT:
            if module is not None:
                return
            checkpoints.append(frame)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _watch(frame: FrameType, module_runs: dict[str, Any]) -> None:
    """Put what is watched in the place of a checkpoint's function."""
    if frame.f_code is _REENTRANT:
        holder, name = frame.f_locals.get("ctx"), "run_function"
        given = frame.f_locals.get("args", ())
    else:
        generator = frame.f_locals.get("gen")
        inside = getattr(generator, "gi_frame", None)
        holder = None if inside is None else inside.f_locals.get("new_frame")
        name, given = "recompute_fn", ()  # it has the very tensors again
    function = getattr(holder, name, None)
    if function is not None and not _is_watched(function, module_runs["self"]):
        setattr(holder, name, Watched(function, module_runs, given))


def _is_watched(function: Any, attachment: Attachment) -> bool:
    while isinstance(function, Watched):
        if function.attachment is attachment:
            return True
        function = function.function
    return False


class Watched:
    """A checkpointed function that runs again as a part of a module.

    Args:
        function: what the checkpoint runs again.
        module_runs: by name, what the attachment knows as it runs the module.
        given: the function's arguments, of which a reentrant checkpoint will give it copies.
    """

    def __init__(self, function: Any, module_runs: dict[str, Any], given: tuple[Any, ...]) -> None:
        self.function = function
        self.attachment: Attachment = module_runs["self"]
        self._path: str = module_runs["path"]
        self._module: nn.Module = module_runs["module"]
        tracked = self.attachment.intercept.tracked
        # Views that the function may find where it is written; a copy would be kept in memory.
        self._views = {key: v for key, v in tracked.views.items() if v.made_by is None}
        self._parameters = [
            (place, each)
            for place, each in enumerate(given)
            if isinstance(each, Tensor) and tracked.name_of(each) is not None
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, watched as long as the model is attached."""
        if not self.attachment.active:
            return self.function(*args, **kwargs)
        return self.attachment.call(self._path, self._run, self._module, args, kwargs)

    def _run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tracked = self.attachment.intercept.tracked
        tracked.views.update(self._views)
        for place, parameter in self._parameters:
            tracked.follow(parameter, args[place], copied=False)
        return self.function(*args, **kwargs)
