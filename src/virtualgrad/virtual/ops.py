r"""Encapsulation 1, the op itself: the same forward, another pull-back into the parameter.

An op sigma = f(x, theta) with x any other values is run as

    main   = f(x, theta held fixed)         its graph carries the true g to x
    shadow = f(x held fixed, theta)         its graph carries T(g) to theta
    sigma  = Join(main, shadow)             value: main;   backward: g to main, T(g) to shadow

which is right for every f, under autocast, in double precision, with hooks on saved tensors, and
needs no backward formula of its own: both pull-backs are autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.compiler import is_compiling

from virtualgrad.errors import DoubleBackwardError
from virtualgrad.operators.channels import Channels, Incoming, Total
from virtualgrad.operators.kernels_of_norms import Norm, NormGradients
from virtualgrad.virtual.asked import Asked, asked_behind, is_wanted, will_reach
from virtualgrad.virtual.tracking import Pass

CAST_BY_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
CONTAINERS = (list, tuple, dict)
MAY_HOLD_TENSORS = (Tensor, *CONTAINERS)


class Transform(Protocol):
    """g -> T(g) at one site; ``asked``, where the graph is kept or was, says for which leaves."""

    current: Pass

    def __call__(self, g: Tensor, asked: Asked | None = None, /) -> Tensor:
        """Return T(g)."""

    def for_layer(
        self, g: Tensor, channels: Channels | None, asked: Asked | None = None
    ) -> Incoming:
        """Return T(g), or g and f where T(g) is f g with one number per channel."""

    def norm_gradients(
        self, g: Tensor, norm: Norm, *, into: Tensor | None, asked: Asked | None = None
    ) -> NormGradients | None:
        """Return the gradients of a batch norm under T; None without kernels."""


LAYER = ("input", "weight", "bias")
"""The operands of the op of a layer."""

Transforms = dict[str, Transform]
"""Argument of an op -> its T. Arguments that are not in it get the true g."""


class Join(torch.autograd.Function):
    """Value of ``main``; in backward the true g to ``main`` and T_k(g) to the k-th shadow."""

    @staticmethod
    def forward(
        ctx: Any, transforms: Sequence[Transform], in_place: bool, main: Tensor, *shadows: Tensor
    ) -> Tensor:
        """Return main; the shadows' values are not used."""
        ctx.transforms = transforms
        ctx.set_materialize_grads(False)
        if in_place:
            ctx.mark_dirty(main)
            return main
        # A plain alias: returned as it is, main would become a view of itself, and the in-place
        # ReLU that follows many a layer would be refused on it.
        if is_compiling():
            return main.clone()  # compilers before torch 2.13 know no such alias; it costs nothing
        return alias_of(main)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Any, ...]:
        """Return g for main, and T_k(g) for every shadow."""
        if g is None:
            return None, None, None, *(None for _ in ctx.transforms)
        begin_backward(ctx.transforms)
        wanted = [is_wanted(ctx, 1 + k) for k in range(len(ctx.transforms))]
        return (
            None,
            None,
            g,
            *(
                transform(g, asked_of(ctx, transform, [1 + k])) if wanted[k] else None
                for k, transform in enumerate(ctx.transforms)
            ),
        )


def alias_of(tensor: Tensor) -> Tensor:
    """The same memory in a tensor of its own, which is no view to autograd."""
    alias: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return alias


def begin_backward(transforms: Iterable[Transform]) -> None:
    """Of an op: refuse a backward pass that records itself, and end the forward pass.

    The forward pass ends where its graph is freed, also by ``torch.autograd.grad(loss, x)``, which
    asks for no T: the next one is no second use of the layers, though ``loss`` may be alive still.
    (Compiled passes are told apart by other means.)
    """
    if is_compiling():
        return
    refuse_create_graph()
    if not _get_current_graph_task_keep_graph():
        for transform in transforms:
            transform.current.consumed = True


def asked_of(
    ctx: Any, transform: Transform, operands: Iterable[int], edges: Any = None
) -> Asked | None:
    """For which leaves behind its operands a T is to run, where several passes may come for it.

    None where the graph is not kept and was not before: then there is one pass, for all of them.
    """
    if is_compiling():
        return None
    if not transform.current.kept and not _get_current_graph_task_keep_graph():
        return None
    edges = edges or ctx.next_functions
    return asked_behind(edges[operand][0] for operand in operands)


def refuse_create_graph() -> None:
    """Raise inside a backward pass that records itself: T has no derivative.

    (Compiled ones are refused by torch.)
    """
    if torch.is_grad_enabled():
        raise DoubleBackwardError.of(
            given="backward with create_graph=True through an op with a virtual gradient",
            allowed="create_graph=False: T has a state and no derivative",
            todo="take such gradients before attaching, or after optimizer.detach()",
        )


def transformed_gradients(
    ctx: Any,
    g: Tensor,
    arguments: Sequence[str],
    needed: Sequence[bool],
    channels: Channels | None = None,
) -> list[Incoming | None]:
    """What each argument of an op is to pull back: T(g), g itself, or None if not needed.

    Arguments that share a T (weight and bias of one layer) share T(g): it runs once.

    Args:
        ctx: of the op's Function; its tensor operands are ``arguments``, in order.
        g: dJ/dsigma.
        arguments: names of the op's tensor arguments.
        needed: which of them require grad.
        channels: what the caller can use of the axis of g that is that of weight and bias. The sum
            for a bias, and what a weight gets, come in the plainest pass only.
    """
    transforms: Transforms = ctx.transforms
    transform: Transform | None
    edges = ctx.next_functions  # made anew at every look
    if arguments is LAYER and _is_plain_pass(transforms, needed, edges):
        transform = transforms["weight"]
        plain = Incoming(g)
        made = transform.for_layer(g, channels)
        for_bias = made if "bias" in transforms else Incoming(g, None, made.total)
        return [plain if needed[0] else None, made, for_bias if needed[2] else None]
    if channels is not None:
        channels = channels._replace(total=None, convolved=None)
    begin_backward(transforms.values())
    incoming: list[Incoming | None] = [None] * len(arguments)
    for operand, (argument, is_needed) in enumerate(zip(arguments, needed, strict=False)):
        if not is_needed:
            continue
        transform = transforms.get(argument)
        if transform is None:
            incoming[operand] = Incoming(g)
            continue
        if not is_wanted(ctx, operand, edges):
            continue
        served = [k for k, name in enumerate(arguments) if transforms.get(name) is transform]
        done = next((incoming[k] for k in served if incoming[k] is not None), None)
        if done is None:
            asked = asked_of(ctx, transform, served, edges)
            done = transform.for_layer(g, channels, asked)
        incoming[operand] = done
    return incoming


def total_for_bias(transforms: Transforms, needed: Sequence[bool]) -> Total | None:
    """What a layer's bias sums, if it is needed: T(g), or the true g where it has no T."""
    if not needed[2]:
        return None
    return "T(g)" if "bias" in transforms else "g"


def _is_plain_pass(transforms: Transforms, needed: Sequence[bool], edges: Any) -> bool:
    """Whether this is the plainest pass of all through a layer: the one of a training step.

    A T for the weight, which is wanted, and the same or none for the bias; the input an activation;
    a graph that is not kept, and was not. Any other pass takes the long way, to the same result.
    """
    if is_compiling() or torch.is_grad_enabled():
        return False
    transform = transforms.get("weight")
    if transform is None or not needed[1] or "input" in transforms:
        return False
    if transform.current.kept or _get_current_graph_task_keep_graph():
        return False
    if transforms.get("bias", transform) is not transform or not will_reach(edges[1][0]):
        return False
    return not needed[2] or "bias" not in transforms or will_reach(edges[2][0])


def in_autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of a product in the dtype in which autocast would run it.

    Cast here, and kept for the backward pass, each is cast once.
    """
    if not torch._C._is_any_autocast_enabled():  # in most passes, and quickly asked
        return x, weight
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # which it does not know
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    if x.dtype in CAST_BY_AUTOCAST:
        x = as_dtype(x, dtype)
    if weight.dtype in CAST_BY_AUTOCAST:
        weight = as_dtype(weight, dtype)
    return x, weight


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; asking first is cheaper than converting to the same."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def hold_fixed(args: Any, kwargs: Any, fixed: Callable[[Tensor], bool]) -> tuple[Any, Any]:
    """Replace every tensor in arguments for which ``fixed`` holds by its detached self."""
    return map_arguments(args, kwargs, lambda t: t.detach() if t.requires_grad and fixed(t) else t)


def hold_fixed_flat(args: tuple[Any, ...], fixed: Callable[[Tensor], bool]) -> tuple[Any, ...]:
    """The same for arguments by position of which none is a list that may hold tensors."""
    return tuple(
        [
            each.detach()
            if isinstance(each, Tensor) and each.requires_grad and fixed(each)
            else each
            for each in args
        ]
    )


def tensors_among(values: tuple[Any, ...]) -> list[Tensor]:
    """All tensors in such arguments."""
    return [each for each in values if isinstance(each, Tensor)]


# The two below ask what an item is before they call anything for it: compilers trace every call.


def map_arguments(
    args: Any, kwargs: Any, function: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace every tensor in (nested) arguments by what a function makes of it."""
    mapped = [_mapped(a, function) if isinstance(a, MAY_HOLD_TENSORS) else a for a in args]
    if not kwargs:
        return tuple(mapped), kwargs
    return tuple(mapped), {name: _mapped(value, function) for name, value in kwargs.items()}


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _mapped(item, function) for name, item in value.items()}
    if type(value) not in (list, tuple):
        return value
    if not any([isinstance(item, MAY_HOLD_TENSORS) for item in value]):  # a stride, or a padding
        return value
    return type(value)([_mapped(item, function) for item in value])


def tensors_in(*values: Any) -> list[Tensor]:
    """All tensors in (nested) arguments, in order, each as often as it stands there."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, CONTAINERS):
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, Tensor):
                    found.append(item)
                elif isinstance(item, CONTAINERS):
                    found += tensors_in(item)
    return found
