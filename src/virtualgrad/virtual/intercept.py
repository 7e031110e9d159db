"""Encapsulation 1, the interception: see every torch function that meets a tracked parameter.

An :class:`Intercept` is a torch function mode. While it is on, each torch function passes through
it, and those that take a tracked parameter directly are run with an extended pull-back. Everything
else runs as it is.

It sorts the functions, and leaves the rest to parts with one task each: :mod:`.parameters` knows
which parameter a tensor is, :mod:`.passes` which pass this is, :mod:`.site_of_call` what sigma is,
:mod:`.plans` which T acts there, :mod:`.runs` how the op runs, and :mod:`.memories` what was run
before. A model calls it for every op, so the parts are plain attributes, with no layer between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from virtualgrad.compiling import is_in_compiled_graph, settled_while_tracing
from virtualgrad.errors import TransformError
from virtualgrad.operators import Operator
from virtualgrad.sites import Site, Where, every_linear_site
from virtualgrad.sites.functions import (
    COPIES,
    EACH,
    LINEAR,
    TRANSPARENT,
    FunctionRule,
    is_basic_index,
)
from virtualgrad.sites.site import has_flat_arguments
from virtualgrad.virtual.calls import Call, one_forward
from virtualgrad.virtual.composites import pieces_of
from virtualgrad.virtual.marks import PLAIN
from virtualgrad.virtual.models import is_attached
from virtualgrad.virtual.ops import tensors_among, tensors_in
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.passes import Passes
from virtualgrad.virtual.plans import Plans
from virtualgrad.virtual.recomputed import may_be_in_checkpoint, watch_checkpoints
from virtualgrad.virtual.runs import run_in_place, run_joined, run_once
from virtualgrad.virtual.shapes import shape_of
from virtualgrad.virtual.site_of_call import key_of, site_of, uses_in
from virtualgrad.virtual.unwatched import Unwatched

_kinds: dict[Any, str] = {}


@settled_while_tracing
def kind_of(func: Any) -> str:
    """Whether a torch function is linear, transparent, a copy, made of pieces, or none of these.

    A compiler asks once, and installs no guards for it.
    """
    kind = _kinds.get(func)
    if kind is None:
        if func in LINEAR:
            kind = "linear"
        elif func in TRANSPARENT:
            kind = "copy" if func in COPIES else "view"
        else:
            kind = "other" if pieces_of(func) is None else "pieces"
        _kinds[func] = kind
    return kind


@settled_while_tracing
def is_view_of_each(func: Any) -> bool:
    """Whether a torch function makes a view of each of the tensors that it gets."""
    return func in EACH


class Intercept(Unwatched):
    """Runs ops on tracked parameters with an extended pull-back.

    Args:
        parameters: name -> tracked parameter.
        operator: T.
        where: chooses the linear sites at which T acts; elsewhere it is the identity.
        group_of: parameters of one site in different groups get a T, and a state, of their own.
        batch_dim: the axis of the inputs that counts samples.

    Attributes:
        path: of the module that runs; None outside of the model.
        parameters_at: site -> the parameters that its T serves; its state is saved at the first.
    """

    _records = False  # whether the pass began with gradients enabled

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        operator: Operator,
        *,
        where: Where = every_linear_site,
        group_of: Callable[[str], Hashable] = lambda name: None,
        batch_dim: int = 0,
    ) -> None:
        super().__init__(TrackedParameters(), Passes(operator), batch_dim)
        self._plans = Plans(self.tracked, self.passes, operator, where, group_of)
        self.parameters_at = self._plans.parameters_at
        self.leaves_norms_out = self._plans.leaves_norms_out
        self.track(parameters)

    # ---------------------------------------------------------------- for an attachment

    def track(self, parameters: Mapping[str, Tensor]) -> None:
        """Track more parameters."""
        if self._marks.are_on:  # in the middle of a pass
            self._watch()
        self.tracked.add(parameters)
        self.is_sharded = self.tracked.has_shards()
        self.forget_layers()
        self._plans.clear()

    @property
    def edition(self) -> str:
        """What compilers guard of all that they are told (see :mod:`.parameters`)."""
        return self.tracked.edition

    def renew(self) -> None:
        """Have compilers ask again."""
        self.tracked.renew()

    def own_parameters(self, module: nn.Module) -> dict[str, str]:
        """What a module calls its tracked parameters -> their names."""
        return self.tracked.own_parameters(module)

    def meet(self, module: nn.Module, own: Mapping[str, str]) -> None:
        """Learn the tensors that stand in for a module's sharded parameters while it runs."""
        self.tracked.meet(module, own)

    def begin(self, batch_size: int | None, training: bool) -> None:
        """Begin a forward pass, or go on with one that no backward pass has consumed yet."""
        self.passes.begin(batch_size, training)
        if not is_compiling():
            self._records = is_grad_enabled()

    def leave(self) -> None:
        """End a forward pass: only the graph keeps it alive from here on."""
        self.tracked.views.clear()
        self.passes.leave()

    def end_step(self, *, failed: bool = False, committed: bool = False) -> None:
        """What was run so far belongs to the past: the next forward pass starts to count anew."""
        self.passes.end_step(failed=failed, committed=committed)

    def release(self) -> None:
        """Let go of the parameters."""
        self.passes.release()
        self.forget_layers()
        self.renew()

    # ---------------------------------------------------------------- torch functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one torch function: extended if it takes a tracked parameter, as it is otherwise."""
        kwargs = kwargs or {}
        compiling = is_compiling()  # which has no time to save, but guards to avoid
        if types and not compiling and not PLAIN.issuperset(types):
            self.has_met_classes = True
        if not compiling and (
            not self.tracked.may_be_among((*args, *kwargs.values()))
            or (self.was_compiled and is_in_compiled_graph(is_attached))  # it was met in the trace
        ):
            return self._other(func, args, kwargs) if self.sees_all_ops else func(*args, **kwargs)
        if not compiling and may_be_in_checkpoint(self._records):
            watch_checkpoints()
        kind = kind_of(func)
        if kind == "linear":
            rule = LINEAR[func]
            done = None if compiling else self._as_before(func, rule, args, kwargs)
            if done is not None:
                return done
            if rule.op != "index" or not is_basic_index(args[1]):
                return self._linear(func, rule, args, kwargs)
            kind = "view"
        if kind in ("view", "copy"):
            return self._transparent(func, args, kwargs, kind)
        if kind == "pieces" and self._meets_parameter(args, kwargs):
            return self._piecewise(func, args, kwargs)
        return self._other(func, args, kwargs)

    def _as_before(self, func: Any, rule: FunctionRule, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a layer as it was run before; None if it was not, or if something has changed."""
        if not is_grad_enabled():
            return None
        position, name = rule.weight
        weight = args[position] if len(args) > position else kwargs.get(name)
        memory = self._memories.layers.get((func, self.path, id(weight)))
        if memory is None or self._is_watched_by_others():
            return None
        views = self.tracked.views
        if views and any(id(value) in views for value in (*args, *kwargs.values())):
            return None  # a parameter in another guise
        return memory.run(func, args, kwargs, self.passes.current, self.batch_dim)

    def _meets_parameter(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        names = [self.tracked.name_of(tensor) for tensor in tensors_in(args, kwargs)]
        return any([name is not None for name in names])

    def _transparent(self, func: Any, args: Any, kwargs: Any, kind: str) -> Any:
        if is_compiling() and func is Tensor.unflatten:
            func = torch.unflatten  # the method is written with super(), which is not traced
        result = func(*args, **kwargs)
        if is_view_of_each(func):
            sources, views = tensors_in(args, kwargs), tensors_in(result)
        else:
            sources, views = [args[0] if args else kwargs.get("input")], [result]
        for source, view in zip(sources, views, strict=True):
            if isinstance(source, Tensor):
                self.tracked.follow(source, view, copied=kind == "copy")
        return result

    def _piecewise(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        before = []
        if func is F.multi_head_attention_forward:  # computes on (length, batch, features)
            query = args[0] if args else kwargs["query"]
            samples = query.shape[1] if query.dim() == 3 else 1
            before = [(each, each._read_batch(1, samples)) for each in (self, *self._others())]
        try:
            with self:
                return pieces_of(func)(*args, **kwargs)  # type: ignore[misc]
        finally:
            for each, batch in before:
                each._read_batch(*batch)

    def _read_batch(self, batch_dim: int, batch_size: int | None) -> tuple[int, int | None]:
        """Read another axis of sigma as that of the samples; return what was read before."""
        current = self.passes.current
        before = self.batch_dim, current.batch_size
        self.batch_dim, current.batch_size = batch_dim, batch_size
        return before

    def _others(self) -> list[Intercept]:
        """Those of other optimizers, which see the pieces, but not what they are pieces of."""
        if is_compiling():  # refused where there are any
            return []
        modes = _get_current_function_mode_stack()
        return [mode for mode in modes if isinstance(mode, Intercept) and mode is not self]

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is checkpoint and is_compiling():
            return self._checkpointed(args, kwargs)
        result = func(*args, **kwargs)
        if (
            self.tracked.views
            and is_compiling()
            and is_grad_enabled()  # else the graph has the parameter still
            and args
            and (result is args[0] or func is Tensor.__setitem__)
        ):
            self.tracked.drop_overwritten(args[0])
        return result

    def _checkpointed(self, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a checkpoint in a compiled pass: compilers take it for one op, and us off in it.

        Uses are counted in it, which no compiler has in a checkpoint: it runs uncompiled, or, with
        ``fullgraph``, is refused.
        """
        function = args[0]

        def watched(*inputs: Any, **named: Any) -> Any:
            with self:
                return function(*inputs, **named)

        return checkpoint(watched, *args[1:], **kwargs)

    def _linear(self, func: Any, rule: FunctionRule, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not is_grad_enabled():
            return func(*args, **kwargs)
        bound = rule.bind(args, kwargs)
        if has_flat_arguments(rule.op):
            tensors = tensors_among((*args, *kwargs.values()))
        else:
            tensors = tensors_in(args, kwargs)
        uses = uses_in(rule, bound, tensors, self.tracked)
        if not uses:
            return self._other(func, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            raise TransformError.of(
                given=f"a torch.func transform over {rule.op}({uses[0].parameter})",
                allowed="backward() and torch.autograd.grad: the state of T is not in the graph",
                todo="call optimizer.detach(), or transform a copy.deepcopy of the model",
            )
        key = key_of(rule, bound, self.tracked, self.path, self.passes.current)
        return self._run_site(Call(func, rule, args, kwargs, bound, tensors, uses, key))

    def _is_watched_by_others(self) -> bool:
        """Whether a second optimizer has parameters of this model: it must see the op as well."""
        if torch._C._len_torch_function_stack() == 0:
            return False
        return any(isinstance(mode, Intercept) for mode in _get_current_function_mode_stack())

    def _run_site(self, call: Call) -> Tensor:
        """Run an op at a site, with T where it is chosen."""
        chosen = {} if is_compiling() else self._chosen_at(call)
        uses = [use for use in call.uses if chosen.get(use.parameter, True)]
        if not uses:  # left out by where: the plain gradient, at no cost
            self._memories.add_left_out(call, self.path)
            return call.plain()
        if len(uses) < len(call.uses):
            call = call._replace(uses=uses)
        plans, current, batch_dim = self._plans, self.passes.current, self.batch_dim
        # Compiled, the second forward of the general way is dead code, and costs nothing.
        general = is_compiling() or self._is_watched_by_others()
        fused = None if general else one_forward(call.rule.op, call.bound)
        if fused is not None:
            sigma, parts = run_once(call, fused, plans, current, batch_dim)
            self._memories.add_layer(
                call, self.path, fused, parts, current=current, batch_dim=batch_dim
            )
            return sigma
        if call.rule.in_place:
            sigma = run_in_place(call, plans, current, batch_dim)
            if is_compiling():
                self.tracked.drop_overwritten(call.args[0])
            return sigma
        return run_joined(call, plans, current, batch_dim)

    def _chosen_at(self, call: Call) -> Mapping[str, bool]:
        """What ``where`` says of the parameters of a call, asked before it runs.

        The answer decides how. A checkpoint runs its ops again in the backward pass, as uses of
        their own, and they must run as they did, be they the first of their number or not.
        """
        chosen = self._plans.chosen.get(call.key, {})
        if self._plans.chooses and any([use.parameter not in chosen for use in call.uses]):
            self._plans.of(call, shape_of(call), self.batch_dim)
            chosen = self._plans.chosen[call.key]
        return chosen

    # ---------------------------------------------------------------- for one that only looks

    def acts_at(self, site: Site) -> bool:
        """Whether T acts at a site, for some parameter of it."""
        return self._plans.choose(site)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Name of the tracked parameter that a tensor is, or is a view of."""
        return self.tracked.name_of(tensor)

    def _site(self, call: Call, shape: tuple[int, ...]) -> Site:
        """The site of a call whose sigma has this shape."""
        return site_of(call, shape, self.tracked, self.passes.current.batch_size, self.batch_dim)
