"""Which torch functions are linear in which argument: the knowledge of encapsulation 1.

A torch function that meets a parameter is one of three kinds:

* **transparent**: a view, a copy or a cast; the parameter is still itself behind it, and the site
  is the first op that computes with it (:data:`TRANSPARENT`);
* **linear** (affine) in the arguments that its :class:`FunctionRule` names (:data:`LINEAR`);
* anything else: not linear, so T is the identity there and the plain gradient flows.

The table of encapsulation 2, written independently of this one, is :mod:`.nodes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.sites.axes import (
    Arguments,
    AxesOf,
    addmm,
    broadcast,
    channel,
    concatenated,
    convolution,
    einsum,
    every,
    indexed,
    last,
    matmul,
    normalized,
    rows_or_last,
    selected,
    tensordot,
)


@dataclass(frozen=True)
class FunctionRule:
    """Where a torch function is linear.

    Attributes:
        op: name of the op.
        names: names of the positional arguments, in order.
        roles: the arguments in which the function is linear, and what each is to it.
        axes: which axes of sigma come from such an argument.
        foldable: see :func:`.site.read_layout`.
        pull_back: a function with the same arguments, the same derivative and no side effect, run
            to get the pull-back into the parameter; None: the function itself.
        in_place: whether the function overwrites its first argument.
    """

    op: str
    names: tuple[str, ...]
    roles: Mapping[str, str]
    axes: AxesOf
    foldable: bool = True
    pull_back: Callable[..., Tensor] | None = None
    in_place: bool = False

    @functools.cached_property
    def weight(self) -> tuple[int, str]:
        """Position and name of the first argument in which the function is linear (by name).

        In place it is the last one: of ``x += theta``, x is seldom a parameter.
        """
        names = [name for name in self.names if name in self.roles]
        name = "weight" if "weight" in names else names[-1 if self.in_place else 0]
        return self.names.index(name), name

    @settled_while_tracing
    def argument_names(self) -> tuple[str, ...]:
        """``names``, of which compilers guard each that they have read, but not what is told."""
        return self.names

    @settled_while_tracing
    def linear_arguments(self) -> tuple[tuple[str, str], ...]:
        """The items of ``roles``, as above."""
        return tuple(self.roles.items())

    def bind(self, args: tuple[Any, ...], kwargs: Arguments) -> dict[str, Any]:
        """Give every argument its name."""
        if self.op == "einsum":  # einsum(equation, *operands), or a list of operands
            operands = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else args[1:]
            return {"equation": args[0], "operands": operands}
        bound: dict[str, Any] = dict(zip(self.argument_names(), args, strict=False))
        return bound | dict(kwargs) if kwargs else bound

    def operands(self, bound: Arguments) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name, role, tensor) of every argument in which the function is linear."""
        for name, role in self.linear_arguments():
            value = bound.get(name)
            if isinstance(value, Tensor):
                yield name, role, value
            elif isinstance(value, list | tuple):
                for number, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield f"{name}[{number}]", role, item

    def is_linear(self, bound: Arguments) -> bool:
        """Whether the function is linear with these arguments."""
        if self.op == "embedding_bag":
            return bool(bound.get("mode", "mean") != "max")
        return bound.get("out") is None


def _signature(text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read ``"input weight:weight bias:bias"``: names in order, and roles behind the colon."""
    names, roles = [], {}
    for word in text.split():
        name, _, role = word.partition(":")
        names.append(name)
        if role:
            roles[name] = role
    return tuple(names), roles


def _running_statistics_untouched(function: Callable[..., Tensor], flag: str) -> Any:
    """The norm as a function of weight and bias alone: running statistics are not updated again."""

    def pull_back(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        uses_batch = rest[0] if rest else options.get(flag, flag == "use_input_stats")
        if uses_batch:
            running_mean = running_var = None
        return function(input, running_mean, running_var, weight, bias, *rest, **options)

    return pull_back


def _group_norm_in_order(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """The group norm, of contiguous memory on a CPU.

    There torch's kernel for channels-last images writes a gradient of the input that was not asked
    for, through a null pointer; and with the input held fixed, nobody asks for it.
    """
    if input.device.type == "cpu":
        input = input.contiguous()
    return torch.group_norm(input, *rest, **options)


LINEAR: dict[Any, FunctionRule] = {}
"""torch function -> where it is linear."""


def _add(op: str, signature: str, axes: AxesOf, *functions: Any, **options: Any) -> None:
    names, roles = _signature(signature)
    rule = FunctionRule(op, names, roles, axes, **options)
    LINEAR.update(dict.fromkeys(functions, rule))


T = Tensor
_add("linear", "input:weight weight:weight bias:bias", rows_or_last, F.linear)
_add("bilinear", "input1 input2 weight:weight bias:bias", last, F.bilinear)
for n in (1, 2, 3):
    for op, geometry in (
        (f"conv{n}d", "stride padding dilation groups"),
        (f"conv_transpose{n}d", "stride padding output_padding groups dilation"),
    ):
        _add(op, f"input weight:weight bias:bias {geometry}", convolution, getattr(F, op))

_add("matmul", "input:weight other:weight", matmul, torch.matmul, T.matmul, T.__matmul__)
_add("matmul", "input:weight other:weight", matmul, torch.linalg.matmul)
_add("mm", "input:weight mat2:weight", matmul, torch.mm, T.mm)
_add("bmm", "input:weight mat2:weight", matmul, torch.bmm, T.bmm)
_add("mv", "input:weight vec:weight", matmul, torch.mv, T.mv)
_add("mv", "input:bias mat:weight vec:weight", addmm, torch.addmv, T.addmv)
_add("dot", "input:weight tensor:weight", matmul, torch.dot, T.dot)
_add("addmm", "input:bias mat1:weight mat2:weight", addmm, torch.addmm, T.addmm)
_add("baddbmm", "input:bias batch1:weight batch2:weight", addmm, torch.baddbmm, T.baddbmm)
_add("einsum", "equation operands:weight", einsum, torch.einsum)
_add("tensordot", "a:weight b:weight dims", tensordot, torch.tensordot)

_add("embedding", "input weight:weight", last, F.embedding, foldable=False)
_add("embedding", "weight:weight indices", last, torch.embedding, foldable=False)
_add(
    "embedding_bag",
    "input weight:weight offsets max_norm norm_type scale_grad_by_freq mode",
    last,
    F.embedding_bag,
    foldable=False,
)
_add("index", "input:weight index", indexed, T.__getitem__, foldable=False)
_add(
    "index_select",
    "input:weight dim index",
    selected,
    torch.index_select,
    T.index_select,
    foldable=False,
)

_norm = "input running_mean running_var weight:weight bias:bias"
_add(
    "batch_norm",
    f"{_norm} training momentum eps",
    channel,
    F.batch_norm,
    pull_back=_running_statistics_untouched(F.batch_norm, "training"),
)
_add(
    "instance_norm",
    _norm,
    channel,
    F.instance_norm,
    pull_back=_running_statistics_untouched(F.instance_norm, "use_input_stats"),
)
_affine = "weight:weight bias:bias"
_add(
    "layer_norm",
    f"input normalized_shape {_affine} eps",
    normalized,
    F.layer_norm,
    torch.layer_norm,
)
_add("rms_norm", "input shape weight:weight", normalized, F.rms_norm, torch.rms_norm)
_add(
    "group_norm",
    f"input groups {_affine}",
    channel,
    F.group_norm,
    torch.group_norm,
    pull_back=_group_norm_in_order,
)
_add("prelu", "input weight:weight", channel, F.prelu, T.prelu)

_add("mul", "input:weight other:weight", broadcast, torch.mul, torch.multiply, T.mul, T.multiply)
_add("mul", "input:weight other:weight", broadcast, T.__mul__, T.__rmul__)
_add("div", "input:weight", broadcast, torch.div, torch.true_divide, T.div, T.true_divide)
_add("div", "input:weight", broadcast, T.__truediv__)
_add("add", "input:bias other:bias", broadcast, torch.add, T.add, T.__add__, T.__radd__)
_add("sub", "input:bias other:bias", broadcast, torch.sub, torch.subtract, torch.rsub, T.sub)
_add("sub", "input:bias other:bias", broadcast, T.__sub__, T.__rsub__, T.subtract)
_add("neg", "input:weight", every, torch.neg, torch.negative, T.neg, T.negative, T.__neg__)
_add("lerp", "input:weight end:weight weight:weight", broadcast, torch.lerp, T.lerp)
_add("addcmul", "input:bias tensor1:weight tensor2:weight", broadcast, torch.addcmul, T.addcmul)
_add("addcdiv", "input:bias tensor1:weight", broadcast, torch.addcdiv, T.addcdiv)
_add("where", "condition input:weight other:weight", broadcast, torch.where)
_add("where", "input:weight condition other:weight", broadcast, T.where)
_add("masked_fill", "input:weight mask", broadcast, torch.masked_fill, T.masked_fill)
for op, roles, out_of_place, overwriting in (
    ("add", "input:bias other:bias", torch.add, (T.add_, T.__iadd__)),
    ("sub", "input:bias other:bias", torch.sub, (T.sub_, T.subtract_, T.__isub__)),
    ("mul", "input:weight other:weight", torch.mul, (T.mul_, T.multiply_, T.__imul__)),
    ("div", "input:weight other", torch.div, (T.div_, T.true_divide_, T.__itruediv__)),
):
    _add(op, roles, broadcast, *overwriting, pull_back=out_of_place, in_place=True)

_add("cat", "tensors:weight", concatenated, torch.cat, torch.concat)
_add("stack", "tensors:weight", every, torch.stack)
_add("sum", "input:weight", every, torch.sum, T.sum)
_add("mean", "input:weight", every, torch.mean, T.mean)
_add("cumsum", "input:weight", every, torch.cumsum, T.cumsum)
_add("tril", "input:weight", every, torch.tril, T.tril)
_add("triu", "input:weight", every, torch.triu, T.triu)
_add("flip", "input:weight", every, torch.flip, T.flip)
_add("roll", "input:weight", every, torch.roll, T.roll)
_add("repeat", "input:weight", every, T.repeat)


def _functions(names: str) -> frozenset[Any]:
    found = [getattr(home, name, None) for name in names.split() for home in (T, torch)]
    return frozenset(f for f in found if callable(f))  # torch.float is a dtype, torch.cuda a module


COPIES = _functions("contiguous clone to type type_as float double half bfloat16 cpu cuda")
"""Copies and casts: axis by axis what was copied."""

EACH = _functions("broadcast_tensors atleast_1d atleast_2d atleast_3d")
"""Views of several tensors at once: one of each, in order."""

TRANSPARENT = (
    COPIES
    | EACH
    | _functions(
        """t transpose swapaxes swapdims permute movedim moveaxis adjoint view view_as reshape
        reshape_as flatten unflatten ravel squeeze unsqueeze expand expand_as broadcast_to chunk
        split tensor_split split_with_sizes hsplit vsplit dsplit unbind select narrow diagonal
        as_strided unfold __iter__ requires_grad_"""
    )
    | {T.T.__get__, T.mT.__get__, T.H.__get__, T.mH.__get__}  # type: ignore[attr-defined]
)
"""Views, copies and casts: the parameter is still itself behind them."""


def is_basic_index(index: Any) -> bool:
    """Whether ``tensor[index]`` is a view: integers, slices, None and Ellipsis only."""
    items = index if isinstance(index, tuple) else (index,)
    return all([_is_basic(item) for item in items])


def _is_basic(item: Any) -> bool:
    if isinstance(item, Tensor):  # torch selects by an integer without axes as by an int
        is_integer = not (item.is_floating_point() or item.is_complex())
        return is_integer and item.dim() == 0 and item.dtype not in (torch.bool, torch.uint8)
    return item is None or (
        isinstance(item, int | slice | type(Ellipsis)) and not isinstance(item, bool)
    )
