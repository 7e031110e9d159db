"""Encapsulation 1, layers of torch.nn: what their forward calls is known, and need not be watched.

A torch function mode costs time at every op, most of all at those that torch has written in Python,
such as batch norm. So a layer that can run as it was run before (:mod:`.memories`) is not watched:
it goes straight to its op, or, where T leaves it out, runs its own forward with the mode off.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Arguments = Callable[[Any, Tensor], tuple[Any, ...]]
"""A layer and its input -> the arguments of its op."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the forward of a class of layers does.

    Attributes:
        layer: the class.
        name: of its one op with parameters, in torch.nn.functional.
        function: that op.
        arguments: of it, if forward does nothing else; else None.
        forward: of the class, as torch has written it.
        inner: the method in which a convolution's forward calls the op; None for others.
    """

    layer: type[nn.Module]
    name: str
    function: Any
    arguments: Arguments | None
    forward: Any
    inner: Any

    @classmethod
    def of(cls, layer: type[nn.Module], name: str, arguments: Arguments | None = None) -> Leaf:
        """What the forward of a class does, with the methods that do it now."""
        inner = getattr(layer, "_conv_forward", None)
        return cls(layer, name, vars(F)[name], arguments, layer.forward, inner)

    def is_torchs_own(self) -> bool:
        """Whether the methods are torch's: others may have put theirs there before this import."""
        written_in = vars(sys.modules[self.layer.__module__])
        methods = [method for method in (self.forward, self.inner) if method is not None]
        return all(getattr(method, "__globals__", None) is written_in for method in methods)

    def is_all_of(self, module: nn.Module) -> bool:
        """Whether a layer calls this op, still torch's own, on its parameters, and does no more.

        Others may have put an op or a method of theirs in its place, on the class or on the layer;
        weight or bias may be a buffer, or made of other parameters; a convolution may pad first.
        (Asked at every run: look-ups only.)
        """
        if vars(F).get(self.name) is not self.function or self.layer.forward is not self.forward:
            return False
        parameters = module._parameters
        if "weight" not in parameters or "bias" not in parameters:
            return False
        if self.inner is None:
            return True
        own = vars(module)
        return (
            own.get("padding_mode") == "zeros"
            and "_conv_forward" not in own
            and type(module)._conv_forward is self.inner  # type: ignore[attr-defined]
        )


def leaf_of(module: nn.Module) -> Leaf | None:
    """What the forward of a module does; None for all that is not just a layer of torch.nn."""
    return LEAVES.get(type(module))


def _of_linear(layer: Any, x: Tensor) -> tuple[Any, ...]:
    parameters = layer._parameters
    return x, parameters["weight"], parameters["bias"]


def _of_convolution(layer: Any, x: Tensor) -> tuple[Any, ...]:
    return (*_of_linear(layer, x), layer.stride, layer.padding, layer.dilation, layer.groups)


def known_leaves() -> dict[type[nn.Module], Leaf]:
    """The layers whose forward is known, less those that others have changed."""
    leaves = (
        Leaf.of(nn.Linear, "linear", _of_linear),
        Leaf.of(nn.Conv1d, "conv1d", _of_convolution),
        Leaf.of(nn.Conv2d, "conv2d", _of_convolution),
        Leaf.of(nn.Conv3d, "conv3d", _of_convolution),
        Leaf.of(nn.BatchNorm1d, "batch_norm"),
        Leaf.of(nn.BatchNorm2d, "batch_norm"),
        Leaf.of(nn.BatchNorm3d, "batch_norm"),
        Leaf.of(nn.LayerNorm, "layer_norm"),
        Leaf.of(nn.GroupNorm, "group_norm"),
    )
    return {leaf.layer: leaf for leaf in leaves if leaf.is_torchs_own()}


LEAVES = known_leaves()
