"""Encapsulation 1, the classes: a subclass for each module, whose forward runs it as we want.

A module with parameters, itself or in its children, runs **under the interception**: it is on while
the code of the module runs. A layer without parameters runs **unwatched**: its op meets nothing but
its input, so the interception is off in it.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from virtualgrad.virtual.leaves import BareLeaf, leaf_of
from virtualgrad.virtual.refusals import refuse_compiled_pair, refuse_compiled_shards
from virtualgrad.virtual.synchronised import seen

if TYPE_CHECKING:
    from virtualgrad.virtual.attach import Attachment

BINDING = "_virtualgrad_attachment"


def attachments_in(cls: type) -> list[Attachment]:
    """The attachments that have given a class to a module, the last one first."""
    bindings = [each.__dict__.get(BINDING) for each in cls.__mro__]
    return [binding for binding in bindings if binding is not None]


def watched_class(attachment: Attachment, module: nn.Module, path: str) -> type[nn.Module]:
    """A subclass of the module's class that runs this one module under the interception."""
    base = type(module)
    # A forward that was put on the module itself hides the one of its class: go round it.
    method = "__call__" if "forward" in vars(module) else "forward"
    leaf = leaf_of(module) if method == "forward" else None
    hides_parameters = isinstance(module, nn.SyncBatchNorm) and method == "forward"
    intercept = attachment.intercept
    own = intercept.own_parameters(module)
    others = attachments_in(base)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(base, method)  # others may have put theirs in its place since
        # "is module": a copy that a class makes of itself by its own means is a plain model.
        if not attachment.active or not torch.is_grad_enabled() or self is not module:
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            if any([other.active for other in others]):
                refuse_compiled_pair(path)
            if intercept.is_sharded:
                refuse_compiled_shards(path)
        else:
            if intercept.is_sharded:
                intercept.meet(self, own)
            if leaf is not None and len(args) == 1 and not kwargs:
                done = intercept.run_leaf(leaf, path, forward, self, args[0])
                if done is not None:
                    return done
        if hides_parameters:
            forward = seen(forward, intercept, path)
        return attachment.call(path, forward, self, args, kwargs)

    return _subclass(attachment, base, method, run)


def unwatched_class(attachment: Attachment, module: nn.Module, leaf: BareLeaf) -> type[nn.Module]:
    """A subclass of the class of a layer without parameters, in which the interception is off."""
    base = type(module)
    intercept = attachment.intercept

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = base.forward
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return forward(self, *args, **kwargs)
        return intercept.run_bare(leaf, forward, self, args[0])

    return _subclass(attachment, base, "forward", run)


def _subclass(
    attachment: Attachment, base: type[nn.Module], method: str, run: Callable[..., Any]
) -> type[nn.Module]:
    """A subclass with the same name and another method; copies and pickles know nothing of it."""
    plain = getattr(base, method)
    functools.update_wrapper(run, plain)
    run.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined] # trainers read it
    # accelerate and others undo what they wrapped by following __wrapped__: they must stop here.
    del run.__wrapped__  # type: ignore[attr-defined]

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = base.__reduce_ex__(self, protocol)
        function, arguments, *rest = reduced
        if function is copyreg.__newobj__ and arguments[0] is cls:  # type: ignore[attr-defined]
            # pickle insists that __newobj__ makes the object's own class; this one does not care.
            return (copyreg._reconstructor, (base, object, None), *rest)  # type: ignore[attr-defined]
        by_base = tuple(base if argument is cls else argument for argument in arguments)
        return (base if function is cls else function, by_base, *rest)

    @functools.wraps(base.zero_grad)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        base.zero_grad(self, *args, **kwargs)
        if attachment.active and self is attachment.model:
            attachment.cleared()

    namespace = {
        method: run,
        "zero_grad": zero_grad,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        BINDING: attachment,
    }
    cls: type[nn.Module] = type(base.__name__, (base,), namespace)
    return cls
