"""Encapsulation 1, the interception: see every torch function that meets a tracked parameter.

An :class:`Intercept` is a torch function mode. While it is on, each torch function passes through
it, and those that take a tracked parameter directly are run with an extended pull-back
(:mod:`.ops`). Everything else runs as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from virtualgrad.compiling import fixed, settled_while_tracing
from virtualgrad.errors import TransformError
from virtualgrad.operators import Operator, identity
from virtualgrad.sites import Site, Where, every_linear_site, read_layout
from virtualgrad.sites.functions import (
    COPIES,
    LINEAR,
    TRANSPARENT,
    FunctionRule,
    broadcast,
    is_basic_index,
)
from virtualgrad.virtual.calls import Call, Fused, Use, one_forward
from virtualgrad.virtual.composites import pieces_of
from virtualgrad.virtual.ops import Join, Transforms, tensors_in
from virtualgrad.virtual.remembered import Layer, LeftOut, Part
from virtualgrad.virtual.tracking import Pass, Transform, View

PLANS_REMEMBERED = 10_000

Plan = list[tuple[Site, Operator]]
"""The parts of a site, and the operator at each."""


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
def _offset(part: Tensor, whole: Tensor) -> int:
    """How many numbers into a parameter a view of it begins."""
    return int(part.storage_offset() - whole.storage_offset())


def _parameter(view: View | None) -> str | None:
    return None if view is None else view.parameter


class Intercept(TorchFunctionMode):
    """Runs ops on tracked parameters with an extended pull-back.

    Args:
        parameters: name -> tracked parameter.
        operator: T.
        where: chooses the linear sites at which T acts; elsewhere it is the identity.
        group_of: parameters of one site in different groups get a T, and a state, of their own.
        batch_dim: the axis of the inputs that counts samples.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        operator: Operator,
        *,
        where: Where = every_linear_site,
        group_of: Callable[[str], Hashable] = lambda name: None,
        batch_dim: int = 0,
    ) -> None:
        super().__init__()
        self.operator = operator
        self.where = where
        self.group_of = group_of
        self.batch_dim = batch_dim
        self.loss_scale = 1.0
        self.ranks = 1
        self.path: str | None = None  # of the module that runs; None outside of the model
        self._names: dict[int, str] = {}
        self._parameters: dict[str, Tensor] = {}  # kept alive: an id stays its parameter's own
        self._gathered: dict[str, Tensor] = {}
        self._views: dict[int, View] = {}
        self._chosen: dict[str, dict[str, bool]] = {}  # site -> parameter -> what where said
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._memories: dict[tuple[Any, str | None, int], LeftOut | Layer] = {}
        # Site -> the parameters that its T serves; its state is saved at the first of them.
        self.parameters_at: dict[str, tuple[str, ...]] = {}
        self.before_pass: Callable[[], None] = lambda: None
        self._current = Pass(None)
        self._live: weakref.ref[Pass] = weakref.ref(self._current)
        self._batch_size: int | None = None  # of the last call
        self._batch_sizes: set[int | None] = set()  # of all calls of this step
        self._recomputing: tuple[int, Pass] | None = None  # backward pass -> its pass
        # Uses since the last backward pass in compiled calls, which no graph of ours holds alive.
        self._uses_in_training: dict[str, int] = {}
        self._uses_in_eval: dict[str, int] = {}
        self._watched: dict[str, Any] = {}
        self.track(parameters)

    def track(self, parameters: Mapping[str, Tensor]) -> None:
        """Track more parameters."""
        self._parameters.update(parameters)
        self.is_sharded = any(hasattr(p, "to_local") for p in self._parameters.values())
        self._names.update({id(p): name for name, p in parameters.items()})
        self._memories.clear()
        self._plans.clear()

    def own_parameters(self, module: nn.Module) -> dict[str, str]:
        """What a module calls its tracked parameters -> their names (a tied one has one name)."""
        own = ((short, self._names.get(id(p))) for short, p in module._parameters.items())
        return {short: name for short, name in own if name is not None}

    def meet(self, module: nn.Module, own: Mapping[str, str]) -> None:
        """Learn the tensors that stand in for a module's sharded parameters while it runs.

        FSDP gathers a parameter into another tensor before the module's forward.
        """
        for short, name in own.items():
            tensor = module._parameters[short]
            if tensor is not None and id(tensor) not in self._names:
                self._names[id(tensor)] = name
                self._gathered[name] = tensor  # kept alive, as above

    def is_replaced(self, name: str, parameter: Tensor) -> bool:
        """Whether another parameter was tracked under this name."""
        return self._parameters.get(name, parameter) is not parameter

    # ---------------------------------------------------------------- the life of a pass

    def begin(self, batch_size: int | None, training: bool) -> None:
        """Begin a forward pass, or go on with one that no backward pass has consumed yet.

        Two calls of a model before one backward pass belong to one graph: its layers are used
        twice, and each use is a site of its own. A call in eval mode does not go on with one in
        training mode, or the other way round.
        """
        if torch.compiler.is_compiling():
            uses = self._uses_in_training if training else self._uses_in_eval
            self._current = Pass(
                batch_size, training, uses, loss_scale=self.loss_scale, ranks=self.ranks
            )
            return
        task = torch._C._current_graph_task_id()
        if task == -1:
            self.before_pass()
            self._batch_size = batch_size
            self._batch_sizes.add(batch_size)
            current = self._live()
            if current is None or current.consumed or current.training != training:
                current = Pass(batch_size, training)
        else:
            current = self._recomputed(task, training)
            # A checkpoint may begin in the middle, behind a reshape: the batch is that of a call.
            if batch_size not in self._batch_sizes:
                batch_size = self._batch_size
        current.batch_size = batch_size
        current.loss_scale, current.ranks = self.loss_scale, self.ranks
        self._live = weakref.ref(current)
        self._current = current

    def _recomputed(self, task: int, training: bool) -> Pass:
        """The pass of which a backward pass recomputes a checkpoint; one for all of them."""
        if self._recomputing is None or self._recomputing[0] != task:
            self._recomputing = (task, self._live() or Pass(self._batch_size, training))
        return self._recomputing[1]

    def leave(self) -> None:
        """End a forward pass: only the graph keeps it alive from here on."""
        self._views.clear()
        self._current = Pass(None)

    def end_step(self) -> None:
        """What was run so far belongs to the past: the next forward pass starts to count anew."""
        current = self._live()
        if current is not None:
            current.consumed = True
        self._batch_sizes.clear()
        self._forget_compiled_uses()

    def _forget_compiled_uses(self, *_: Any) -> None:
        self._uses_in_training.clear()
        self._uses_in_eval.clear()

    def release(self) -> None:
        """Let go of the parameters."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    # ---------------------------------------------------------------- torch functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one torch function: extended if it takes a tracked parameter, as it is otherwise."""
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind == "linear":
            rule = LINEAR[func]
            done = self._as_before(func, rule, args, kwargs)
            if done is not None:
                return done
            if rule.op == "index" and is_basic_index(args[1]):
                return self._transparent(func, args, kwargs, "view")
            return self._linear(func, rule, args, kwargs)
        if kind in ("view", "copy"):
            return self._transparent(func, args, kwargs, kind)
        if kind == "pieces" and self._meets_parameter(args, kwargs):
            return self._piecewise(func, args, kwargs)
        return self._other(func, args, kwargs)

    def _as_before(self, func: Any, rule: FunctionRule, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a layer as it was run before; None if it was not, or if something has changed."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        position, name = rule.weight
        weight = args[position] if len(args) > position else kwargs.get(name)
        memory = self._memories.get((func, self.path, id(weight)))
        if memory is None or self._is_watched_by_others():
            return None
        if self._views and any(id(value) in self._views for value in (*args, *kwargs.values())):
            return None  # a parameter in another guise
        return memory.run(func, args, kwargs, self._current, self.batch_dim)

    def _remember_layer(self, call: Call, memory: LeftOut | Layer) -> None:
        position, name = call.rule.weight
        weight = call.args[position] if len(call.args) > position else call.kwargs.get(name)
        if isinstance(weight, nn.Parameter) and id(weight) in self._names:
            self._memories[call.function, self.path, id(weight)] = memory

    def _meets_parameter(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        names = [self._name_of(tensor) for tensor in tensors_in((args, kwargs))]
        return any([name is not None for name in names])

    def _transparent(self, func: Any, args: Any, kwargs: Any, kind: str) -> Any:
        if torch.compiler.is_compiling() and func is Tensor.unflatten:
            func = torch.unflatten  # the method is written with super(), which is not traced
        result = func(*args, **kwargs)
        source = args[0] if args and isinstance(args[0], Tensor) else None
        name = None if source is None else self._name_of(source)
        if source is None or name is None:
            return result
        if isinstance(result, Iterator):  # iteration over a parameter goes through unbind
            result = list(result)
            self._remember(name, result, None)
            return iter(result)
        self._remember(name, result, self._strided(source) if kind == "copy" else None)
        return result

    def _remember(self, name: str, result: Any, strided: Tensor | None) -> None:
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                like = tensor if strided is None else strided
                # A compiler has no id for what it has not made yet.
                compiling = torch.compiler.is_compiling()
                key = len(self._views) if compiling else id(tensor)
                self._views[key] = View(name, tensor, like)

    def _piecewise(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        batch_dim, batch_size = self.batch_dim, self._current.batch_size
        if func is F.multi_head_attention_forward:  # computes on (length, batch, features)
            query = args[0] if args else kwargs["query"]
            self.batch_dim = 1
            self._current.batch_size = query.shape[1] if query.dim() == 3 else 1
        try:
            with self:
                return pieces_of(func)(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.batch_dim, self._current.batch_size = batch_dim, batch_size

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if self._views and isinstance(result, Tensor) and args and result is args[0]:
            # A copy that was overwritten: no parameter any more.
            self._views = {k: v for k, v in self._views.items() if v.tensor is not result}
        return result

    def _linear(self, func: Any, rule: FunctionRule, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        bound = rule.bind(args, kwargs)
        uses = self._uses(rule, bound, (args, kwargs))
        if not uses:
            return self._other(func, args, kwargs)
        if torch._C._are_functorch_transforms_active():
            raise TransformError.of(
                given=f"a torch.func transform over {rule.op}({uses[0].parameter})",
                allowed="backward() and torch.autograd.grad: the state of T is not in the graph",
                todo="call optimizer.detach(), or transform a copy.deepcopy of the model",
            )
        key = self._key(rule, bound)
        return self._run_site(Call(func, rule, args, kwargs, bound, uses, key))

    def _is_watched_by_others(self) -> bool:
        """Whether a second optimizer has parameters of this model: it must see the op as well."""
        if torch._C._len_torch_function_stack() == 0:
            return False
        return any(isinstance(mode, Intercept) for mode in _get_current_function_mode_stack())

    def _run_site(self, call: Call) -> Tensor:
        """Run an op at a site, with T where it is chosen."""
        chosen = {} if torch.compiler.is_compiling() else self._chosen.get(call.key, {})
        uses = [use for use in call.uses if chosen.get(use.parameter, True)]
        if not uses:  # left out by where: the plain gradient, at no cost
            self._remember_left_out(call)
            return call.plain()
        if len(uses) < len(call.uses):
            call = replace(call, uses=uses)
        # Compiled, the second forward of the general way is dead code, and costs nothing.
        general = torch.compiler.is_compiling() or self._is_watched_by_others()
        fused = None if general else one_forward(call.rule.op, call.bound)
        if fused is not None:
            return self._run_once(call, fused)
        if call.rule.in_place:
            return self._run_in_place(call)
        main = call.main()
        plan = self._plan(call, tuple(main.shape))
        return self._join(plan, main, [call.shadow(part, call.args) for part, _ in plan])

    def _remember_left_out(self, call: Call) -> None:
        """Remember a layer at which T does not act, if ``where`` was asked for all parameters."""
        asked = [use.tensor for use in call.uses]
        operands = [tensor for _, _, tensor in call.rule.operands(call.bound)]
        parameters = [tensor for tensor in operands if isinstance(tensor, nn.Parameter)]
        if len(asked) == len(parameters) and all(isinstance(p, nn.Parameter) for p in asked):
            self._remember_layer(call, LeftOut(parameters))

    def _run_once(self, call: Call, fused: Fused) -> Tensor:
        """An op with a Function of its own: one forward; its T is looked up in backward."""
        transforms: Transforms = {}
        sigma = fused.run(transforms, call.bound["input"])
        parts = []
        for part, operator in self._plan(call, tuple(sigma.shape)):
            if operator is identity and self.operator is not identity:
                continue  # what has no transform gets the true g
            transform = Transform(operator, part, self._current)
            served = tuple(use.argument for use in call.uses if use.parameter in part.parameters)
            transforms.update(dict.fromkeys(served, transform))
            parts.append((part, operator, served))
        self._remember_once(call, fused, parts)
        return sigma

    def _remember_once(self, call: Call, fused: Fused, parts: list[Part]) -> None:
        """Remember how a layer was run, if it is one that runs as plainly the next time."""
        others = call.args[1:]
        tensors = [other for other in others if isinstance(other, Tensor)]
        plain = all(isinstance(tensor, nn.Parameter) for tensor in tensors) and not call.kwargs
        if not plain or isinstance(call.args[0], nn.Parameter):
            return
        key, _, number = call.key.partition("#")
        wanted = tuple(isinstance(other, Tensor) and other.requires_grad for other in others)
        layer = Layer(key, others, wanted, fused.run)
        position, _ = call.rule.weight
        known = self._memories.get((call.function, self.path, id(call.args[position])))
        if isinstance(known, Layer) and known.is_same(call.args):
            layer = known
        x = call.args[0]
        situation = (int(number or 0), x.shape, x.dtype, self._current.batch_size, self.batch_dim)
        layer.parts[situation] = parts
        self._remember_layer(call, layer)

    def _run_in_place(self, call: Call) -> Tensor:
        """Run ``x op= theta``: the pull-back into theta needs the old x, so take it first."""
        target = call.args[0]
        plan = self._plan(call, tuple(target.shape))
        old = (target.detach().clone(), *call.args[1:])
        shadows = [call.shadow(part, old) for part, _ in plan]
        if torch.compiler.is_compiling():  # a compiler makes it in place again
            target.copy_(self._join(plan, call.main(out_of_place=True), shadows))
            return target  # type: ignore[no-any-return]
        return self._join(plan, call.main(), shadows, in_place=True)

    def _join(
        self, plan: Plan, main: Tensor, shadows: list[Tensor], in_place: bool = False
    ) -> Tensor:
        transforms = [Transform(operator, part, self._current) for part, operator in plan]
        sigma: Tensor = Join.apply(transforms, in_place, main, *shadows)
        return sigma

    # ---------------------------------------------------------------- what a site is

    def _name_of(self, tensor: Tensor) -> str | None:
        """Name of the tracked parameter that a tensor is, or is a view of."""
        if isinstance(tensor, nn.Parameter):
            name = self._names.get(id(tensor))
            if name is not None:
                return name if tensor.requires_grad else None
        return _parameter(self._view_of(tensor))

    def _view_of(self, tensor: Tensor) -> View | None:
        """What a tensor is a view of, if it is one of a tracked parameter."""
        if not self._views:
            return None
        if not torch.compiler.is_compiling():
            return self._views.get(id(tensor))
        for view in self._views.values():  # a compiler would guard the id of an input
            if view.tensor is tensor:
                return view
        return None

    def _strided(self, tensor: Tensor) -> Tensor:
        """A tensor with the same axes whose strides tell where the parameter was expanded."""
        view = self._view_of(tensor)
        return tensor if view is None else view.strided

    def _uses(self, rule: FunctionRule, bound: dict[str, Any], arguments: Any) -> list[Use]:
        """Tracked parameters in which this call is linear: each stands in it once."""
        uses = []
        for argument, role, tensor in rule.operands(bound):
            name = self._name_of(tensor)
            if name is not None:
                uses.append(Use(argument, role, tensor, name, self._strided(tensor)))
        if not uses or not rule.is_linear(bound):
            return []
        everywhere = [self._name_of(tensor) for tensor in tensors_in(arguments)]
        return [use for use in uses if everywhere.count(use.parameter) == 1]

    def _key(self, rule: FunctionRule, bound: dict[str, Any]) -> str:
        """Name of sigma: module, op, first parameter, and which use of it this is in this pass.

        The first parameter counts even while it is frozen, so that the name, and r with it,
        outlasts parameters that thaw or come later.
        """
        first = ""
        for _, _, tensor in rule.operands(bound):
            first = self._name_with_offset(tensor)
            if first:
                break
        path = self.path or ""
        key = f"{path or '(model)'}:{rule.op}({first.removeprefix(f'{path}.')})"
        number = fixed(self._current.uses.get(key, 0))
        self._current.uses[key] = number + 1
        return key if number == 0 else f"{key}#{number}"

    def _name_with_offset(self, tensor: Tensor) -> str:
        """Name of a tracked parameter, frozen or not; of a slice, also where it begins.

        So an expert of a stack keeps its r while others get no rows.
        """
        if isinstance(tensor, nn.Parameter) and id(tensor) in self._names:
            return self._names[id(tensor)]
        view = self._view_of(tensor)
        if view is None:
            return ""
        whole = self._gathered.get(view.parameter, self._parameters[view.parameter])
        if view.strided.numel() >= whole.numel():
            return view.parameter
        return f"{view.parameter}@{_offset(view.strided, whole)}"

    def _is_parameter(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or self._view_of(tensor) is not None

    def _site(self, call: Call, shape: tuple[int, ...]) -> Site:
        axes: set[int] = set()
        for use in call.uses:
            axes |= call.rule.axes(len(shape), use.argument, use.strided, call.bound)
        operands = tensors_in((call.args, call.kwargs))
        alone = all([self._is_parameter(tensor) for tensor in operands])
        if alone:  # no samples but those along which a parameter was expanded
            axes = self._axes_of_all(call, operands, len(shape))
        layout = read_layout(
            shape,
            frozenset(axes),
            batch_size=self._current.batch_size,
            batch_dim=fixed(self.batch_dim),
            foldable=call.rule.foldable and not alone,
        )
        parameters = tuple(use.parameter for use in call.uses)
        roles = tuple(use.role for use in call.uses)
        return Site(call.key, call.rule.op, parameters, roles, True, shape, layout)

    def _axes_of_all(self, call: Call, operands: list[Tensor], rank: int) -> set[int]:
        """Axes of sigma along which some operand differs, be the op linear in it or not."""
        axes: set[int] = set()
        linear = list(call.rule.operands(call.bound))
        for argument, _, tensor in linear:
            axes |= call.rule.axes(rank, argument, self._strided(tensor), call.bound)
        for tensor in operands:
            if not any([tensor is other for _, _, other in linear]):
                axes |= broadcast(rank, "", self._strided(tensor), call.bound)
        return axes

    def _plan(self, call: Call, shape: tuple[int, ...]) -> Plan:
        """The parts of a site, remembered as long as nothing that they depend on changes."""
        if torch.compiler.is_compiling():
            return self._split(self._site(call, shape))
        operands = tuple((u.argument, u.strided.shape, u.strided.stride()) for u in call.uses)
        situation = (call.key, shape, operands, self._current.batch_size, self.batch_dim)
        plan = self._plans.get(situation)
        if plan is None:
            if len(self._plans) >= PLANS_REMEMBERED:  # inputs of ever new sizes
                self._plans.clear()
            plan = self._plans[situation] = self._split(self._site(call, shape))
        return plan

    def _split(self, site: Site) -> Plan:
        """Split a site into parts with one operator each: by choice, then by parameter group."""
        groups: dict[Hashable, list[str]] = {}
        left: list[str] = []
        for name in site.parameters:
            if self._is_chosen(site, name):
                groups.setdefault(self.group_of(name), []).append(name)
            else:
                left.append(name)
        plan: Plan = []
        for number, names in enumerate(groups.values()):
            part = site.only(*names)
            if number > 0:  # sigma's r is the first group's; another one keeps its own
                part = replace(part, key=f"{site.key}[{names[0]}]")
            self._note_parameters(part.key, tuple(names), torch.compiler.is_compiling())
            plan.append((part, self.operator))
        return [*plan, (site.only(*left), identity)] if left else plan

    def _is_chosen(self, site: Site, name: str) -> bool:
        """What ``where`` says; asked once, or once per compilation."""
        if torch.compiler.is_compiling():
            return bool(self.where(site.only(name)))
        chosen = self._chosen.setdefault(site.key, {})
        if name not in chosen:
            chosen[name] = bool(self.where(site.only(name)))
        return chosen[name]

    @settled_while_tracing
    def _note_parameters(self, key: str, names: tuple[str, ...], compiling: bool) -> None:
        """Remember what a T serves; of a compiled call, watch one parameter for its backward."""
        self.parameters_at[key] = names
        if compiling and not self._watched:
            parameter = self._parameters[names[0]]
            self._watched[names[0]] = parameter.register_post_accumulate_grad_hook(
                self._forget_compiled_uses
            )
