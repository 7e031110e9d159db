"""Encapsulation 1, one call: a torch function that is linear in tracked parameters.

A call can run as it is, with some tensors held fixed (:mod:`.ops` needs both halves), or, where the
op has a Function of its own, in one forward. (Both records are tuples, as sites are.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from virtualgrad.sites import Site
from virtualgrad.sites.functions import FunctionRule
from virtualgrad.sites.site import has_flat_arguments, is_convolution
from virtualgrad.virtual.convolutions import Convolution, Geometry, geometry
from virtualgrad.virtual.layer_norms import LayerNorm, layer_norm_arguments
from virtualgrad.virtual.native_contexts import Run
from virtualgrad.virtual.native_layers import native_layer
from virtualgrad.virtual.norms import BatchNorm, batch_norm_arguments
from virtualgrad.virtual.ops import Transforms, hold_fixed, hold_fixed_flat
from virtualgrad.virtual.products import PRODUCTS


class Use(NamedTuple):
    """One tracked parameter among the arguments of a torch function."""

    argument: str
    role: str
    tensor: Tensor
    parameter: str
    strided: Tensor


class Call(NamedTuple):
    """A call of a torch function that is linear in tracked parameters.

    Attributes:
        function: the torch function.
        rule: where it is linear.
        args: its arguments by position.
        kwargs: and by name.
        bound: all of them by name.
        tensors: those that are tensors, or hold some, in order.
        uses: the tracked parameters in which it is linear here.
        key: name of sigma.
    """

    function: Any
    rule: FunctionRule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: dict[str, Any]
    tensors: list[Tensor]
    uses: list[Use]
    key: str

    def plain(self) -> Tensor:
        """Run the function as it is."""
        result: Tensor = self.function(*self.args, **self.kwargs)
        return result

    def main(self, out_of_place: bool = False) -> Tensor:
        """Run the function with the tracked parameters held fixed."""
        tracked = [use.tensor for use in self.uses]
        args, kwargs = self._hold_fixed(self.args, lambda tensor: _is_in(tensor, tracked))
        pull_back = self.rule.pull_back if out_of_place else None
        result: Tensor = (pull_back or self.function)(*args, **kwargs)
        return result

    def shadow(self, part: Site, args: tuple[Any, ...], main: Tensor) -> Tensor:
        """Run the pull-back's function with everything but a part's parameters held fixed.

        Its value is not used, but it is as large as ``main``.
        """
        uses = [use for use in self.uses if use.parameter in part.parameters]
        if is_convolution(self.rule.op) and [use.argument for use in uses] == ["bias"]:
            # oneDNN pulls back into the weight, too, if only the bias is asked for.
            space = self.bound["weight"].dim() - 2
            per_channel = uses[0].tensor.to(main.dtype).view(-1, *([1] * space))
            return per_channel.expand(main.shape)
        free = [use.tensor for use in uses]
        args, kwargs = self._hold_fixed(args, lambda tensor: not _is_in(tensor, free))
        result: Tensor = (self.rule.pull_back or self.function)(*args, **kwargs)
        return result

    def _hold_fixed(self, args: tuple[Any, ...], fixed: Callable[[Tensor], bool]) -> Any:
        """Arguments with the tensors for which ``fixed`` holds detached."""
        if self.kwargs or not has_flat_arguments(self.rule.op):
            return hold_fixed(args, self.kwargs, fixed)
        return hold_fixed_flat(args, fixed), self.kwargs


def _is_in(tensor: Tensor, tensors: list[Tensor]) -> bool:
    for other in tensors:  # noqa: SIM110 - compilers trace a frame more for a generator
        if tensor is other:
            return True
    return False


@dataclass(frozen=True)
class Fused:
    """An op as a Function that needs one forward only: sigma = function(input, *others)."""

    function: Any
    others: tuple[Any, ...]
    shape: Geometry | None = None

    def run(self, transforms: Transforms, x: Tensor) -> Tensor:
        """Run the op on an input."""
        in_cpp = self._in_cpp()
        if in_cpp is not None:
            (x,) = unwrap_dead_wrappers((x,))  # of functorch, as torch's apply does
            return in_cpp(transforms, x)
        ahead = (transforms,) if self.shape is None else (transforms, self.shape)
        sigma: Tensor = self.function.apply(*ahead, x, *self.others)
        return sigma

    def again(self) -> Run:
        """The same for later calls, made for speed."""
        return self._in_cpp() or self._by_python()

    def _in_cpp(self) -> Run | None:
        """The op as a node of C++, where there is one for it, and it was built."""
        return native_layer(self.function, self.others, self.shape, self._by_python())

    def _by_python(self) -> Run:
        """The op as a node of Python: torch's ``apply`` without what it asks first.

        (Whether functorch is at work, which the caller knows, and tensors that it left behind.)
        """
        apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]
        others = self.others
        if self.shape is None:
            return lambda transforms, x: apply(transforms, x, *others)
        shape = self.shape
        return lambda transforms, x: apply(transforms, shape, x, *others)


NORMS: dict[str, tuple[Any, Callable[[dict[str, Any]], tuple[Any, ...] | None]]] = {
    "batch_norm": (BatchNorm, batch_norm_arguments),
    "layer_norm": (LayerNorm, layer_norm_arguments),
}
"""Op -> its Function, and what that takes behind the input."""


def one_forward(op: str, bound: dict[str, Any]) -> Fused | None:
    """The op as a Function that needs one forward only; None if it has none."""
    if any(isinstance(value, Tensor) and value.is_complex() for value in bound.values()):
        return None  # the general way conjugates as autograd does
    if op == "linear" and not _is_plain_linear(bound):
        return None
    if op in NORMS:
        norm, behind_input = NORMS[op]
        arguments = behind_input(bound)
        return None if arguments is None else Fused(norm, arguments)
    if op in PRODUCTS:
        function, names = PRODUCTS[op]
        return Fused(function, tuple(bound.get(name) for name in names[1:]))
    if is_convolution(op):
        shape = geometry(op, bound)
        if shape is not None:
            return Fused(Convolution, (bound["weight"], bound.get("bias")), shape)
    return None


def _is_plain_linear(bound: dict[str, Any]) -> bool:
    """Whether a linear op has a matrix, and no bias that is a matrix, too, as (1, C) may be."""
    bias = bound.get("bias")
    return bound["weight"].dim() == 2 and (bias is None or bias.dim() <= 1)
