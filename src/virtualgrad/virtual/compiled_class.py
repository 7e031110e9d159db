"""Encapsulation 1, compiled: how an attached module runs while a compiler traces it.

What a compiler reads, it guards, at every call from then on. So what depends on the module alone it
is told, once, as a plain value (:class:`Told`), and guards the ``edition`` of the interception
instead, which changes whenever it would be told something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _len_torch_function_stack

from virtualgrad.virtual.refusals import (
    refuse_compiled_pair,
    refuse_compiled_shards,
    refuse_late_compilation,
)
from virtualgrad.virtual.synchronised import seen

if TYPE_CHECKING:
    from virtualgrad.virtual.attach import Attachment

Way = Literal["", "left out", "hides parameters"]
Refusal = Literal["", "pair", "shards", "marks"]
Told = tuple[str, Way, Refusal]
"""Of a module: its path; whether it runs in a way of its own; why it must not, if so."""


def run_compiled(
    attachment: Attachment, forward: Any, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Run a module of an attachment.

    Args:
        attachment: has given the module its class.
        forward: of the class before.
        module: the module.
        args: its inputs by position.
        kwargs: and by name.
    """
    if not torch.is_grad_enabled() or not attachment.active:
        return forward(module, *args, **kwargs)
    intercept = attachment.intercept
    told = attachment.tell(id(module), intercept.tracked.edition)
    if told is None:
        return forward(module, *args, **kwargs)
    path, way, refusal = told
    if refusal:
        _refuse(refusal, path)
    in_model = intercept.path is not None  # and our mode is on
    if in_model and way == "left out" and _is_on_activation_alone(args):
        with DisableTorchFunction():  # it need not be looked at to be left out
            return forward(module, *args, **kwargs)
    if way == "hides parameters":
        forward = seen(forward, intercept, path)
    return attachment.call(path, forward, module, args, kwargs)


def _refuse(why: Refusal, path: str) -> None:
    """Raise where a compiled pass could not be right."""
    if why == "pair":
        refuse_compiled_pair(path)
    if why == "shards":
        refuse_compiled_shards(path)
    refuse_late_compilation()


def _is_on_activation_alone(args: tuple[Any, ...]) -> bool:
    """Whether a module gets one plain tensor, and no other mode than ours wants to see its ops."""
    return len(args) == 1 and type(args[0]) is Tensor and _len_torch_function_stack() == 1
