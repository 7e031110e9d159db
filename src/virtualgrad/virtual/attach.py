"""Encapsulation 1, the attachment: let the modules of a model run under an interception.

Each module that holds parameters, itself or in its children, gets a class of its own: a subclass
of its class with the same name, whose ``forward`` switches the interception on. Nothing is stored
in the module, so copies, pickles and state_dicts of an attached model are those of a plain one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad.compiling import fixed, settled_while_tracing
from virtualgrad.errors import ModelError
from virtualgrad.virtual.attached_class import Classes, attachments_in
from virtualgrad.virtual.compiled_class import Told
from virtualgrad.virtual.inputs import batch_size, strange_in, tensors_of
from virtualgrad.virtual.intercept import Intercept
from virtualgrad.virtual.marks import PLAIN, Marked
from virtualgrad.virtual.models import BINDING, require_attachable, unwrap
from virtualgrad.virtual.recomputed import runs_modules
from virtualgrad.virtual.refusals import refuse_inputs, refuse_thread


class Attachment:
    """An interception bound to the modules of a model.

    ``with Attachment(model, intercept): ...`` or :meth:`detach` puts the model back.
    """

    def __init__(self, model: nn.Module, intercept: Intercept) -> None:
        self.model = unwrap(model)
        self.intercept = intercept
        self.active = True
        self.cleared: Callable[[], None] = lambda: None  # by model.zero_grad
        self._modules: list[nn.Module] = []
        self._classes = Classes(self)
        self._turn = threading.Lock()  # held while a pass runs
        self._thread: int | None = None  # that holds it
        self._has_warned = False  # of inputs without a tensor
        self.refresh()

    @property
    def is_attached(self) -> bool:
        """Whether it has modules; also while it is paused, and not :attr:`active`."""
        return bool(self._modules)

    def refresh(self) -> None:
        """Attach to modules that have come to the model since."""
        require_attachable(self.model)
        known = {id(module) for module in self._modules}
        count = len(self._modules)
        try:
            for path, module in self.model.named_modules():
                if id(module) not in known and next(module.parameters(), None) is not None:
                    self._attach(module, path)
        except BaseException:
            for module in self._modules[count:]:  # all of them, or none
                module.__class__ = type(module).__base__  # type: ignore[assignment]
            self._classes.forget(self._modules[count:])
            del self._modules[count:]
            raise
        if len(self._modules) > count:
            self.intercept.renew()

    def _attach(self, module: nn.Module, path: str) -> None:
        """Give a module a class of its own; raise where its class does not let us."""
        try:
            module.__class__ = self._classes.watched(module, path)
        except Exception as error:
            raise ModelError.of(
                given=f"{type(module).__name__} at {path or 'the top of the model'!r}, of which no "
                f"subclass can be made ({type(error).__name__}: {error})",
                allowed="modules whose class can have a subclass, by which their ops are seen",
                todo="let its __init_subclass__ and its metaclass do without further arguments, "
                "or pass the part of the model that leaves it out",
            ) from error
        self._modules.append(module)

    def detach(self) -> None:
        """Put the model back as it was; classes that others put on top stay, and do nothing."""
        self.active = False
        self.intercept.release()
        for module in self._modules:
            for each in attachments_in(type(module)):  # this one no longer is a second one for them
                each.intercept.renew()
            while True:
                binding = type(module).__dict__.get(BINDING)
                if binding is None or binding.active:
                    break
                module.__class__ = type(module).__base__  # type: ignore[assignment]
        self._classes.forget(self._modules)
        self._modules.clear()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def call(self, path: str, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's forward under the interception, in the thread of the pass.

        Torch function modes are on in one thread only: ops in others would not be seen.
        """
        if not torch.compiler.is_compiling() and self._thread != threading.get_ident():
            return self._take_turn(path, forward, module, args, kwargs)
        return self._run(path, forward, module, args, kwargs)

    @runs_modules
    def _run(self, path: str, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        intercept = self.intercept
        outer, intercept.path = intercept.path, path
        try:
            if outer is None:
                return self._run_pass(forward, module, args, kwargs)
            if not torch.compiler.is_compiling():
                if is_recomputing() and not intercept.is_on():  # by torch.autograd.grad in a pass
                    with intercept:
                        return forward(module, *args, **kwargs)
                if intercept.has_marks_on and not _have_plain(args, kwargs):
                    intercept.meet_classes()
                intercept.look_again()
            return forward(module, *args, **kwargs)
        finally:
            intercept.path = outer

    def _run_pass(self, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a forward pass: that of the module with which it begins."""
        intercept = self.intercept
        intercept.begin(self._batch_size(module, args, kwargs), module.training)
        try:
            if torch.compiler.is_compiling():
                with intercept:
                    return forward(module, *args, **kwargs)
            by_marks = _may_meet_marks(args, kwargs)
            return intercept.run_pass(forward, module, args, kwargs, by_marks=by_marks)
        except BaseException:
            intercept.end_step(failed=True)  # an exception may keep the half-made graph alive
            raise
        finally:
            intercept.leave()

    def _batch_size(self, module: nn.Module, args: Any, kwargs: Any) -> int | None:
        """The number of samples in the inputs of a pass, if there are any."""
        batch_dim = fixed(self.intercept.batch_dim)
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and args[0].dim() > batch_dim:
            return args[0].shape[batch_dim]  # as a rule
        size = batch_size((args, kwargs), batch_dim)
        if size is None and not is_recomputing():
            found = tensors_of((args, kwargs), True)
            shapes = [tuple(each.shape) for each in found if isinstance(each, Tensor)]
            strange = strange_in(args, kwargs)
            if shapes and batch_dim > 0:  # a tensor without axes is no batch, but needs none
                refuse_inputs(type(module).__name__, batch_dim, str(shapes[0]))
            elif strange and not shapes:
                self._warn(type(module).__name__, strange)
        return size

    @settled_while_tracing
    def tell(self, module_id: int, edition: str) -> Told | None:
        """What a compiler must know of a module; None if that runs as it is.

        It guards the id, and the edition, which no other attachment has.
        """
        return self._classes.tell(module_id)

    @settled_while_tracing
    def _warn(self, name: str, strange: str) -> None:
        """Tell once of inputs in which there is no tensor."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{name} was called with {strange}, in which no tensor was found: the number of "
                "samples is not known, and rows in which samples and positions are folded are all "
                "taken for samples. Pass tensors, tuples, dicts or dataclasses of them, whose axis "
                "batch_dim counts the samples",
                stacklevel=2,
            )

    def _take_turn(self, path: str, forward: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module in a thread in which no pass runs yet; raise if one does in another."""
        if torch.compiler.is_compiling():  # it comes here behind a graph break
            return self._run(path, forward, module, args, kwargs)
        if not self._turn.acquire(blocking=False):
            refuse_thread(path)
        self._thread = threading.get_ident()
        try:
            return self._run(path, forward, module, args, kwargs)
        finally:
            self._thread = None
            self._turn.release()


def _may_meet_marks(args: Any, kwargs: Any) -> bool:
    """Whether a pass on these inputs may have marked parameters.

    Inputs with a torch function of their own need not know what to make of them.
    """
    return not is_recomputing() and _have_plain(args, kwargs)


def _have_plain(args: Any, kwargs: Any) -> bool:
    """Whether no tensor among inputs is of a class with a torch function of its own, but ours."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # as a rule
        return True
    tensors = [each for each in tensors_of((args, kwargs), True) if isinstance(each, Tensor)]
    return all([type(each) in PLAIN or isinstance(each, Marked) for each in tensors])


def is_recomputing() -> bool:
    """Whether a backward pass runs a part of the forward again (a checkpoint)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def attachments_of(model: nn.Module) -> list[Attachment]:
    """The attachments that are active somewhere in a model."""
    found: dict[int, Attachment] = {}
    for module in model.modules():
        found |= {id(each): each for each in attachments_in(type(module)) if each.active}
    return list(found.values())
