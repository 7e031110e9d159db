"""Encapsulation 1, layers of torch.nn: what their forward calls is known, and need not be watched.

A torch function mode costs time at every op, most of all at those that torch has written in Python,
such as batch norm. So a layer that can run as it was run before (:mod:`.memories`) is not watched:
it goes straight to its op, or, where T leaves it out, runs its own forward with the mode off.
"""

from __future__ import annotations

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
        name: of its one op with parameters, in torch.nn.functional.
        function: that op.
        arguments: of it, if forward does nothing else; else None.
    """

    name: str
    function: Any
    arguments: Arguments | None = None

    def is_all_of(self, module: nn.Module) -> bool:
        """Whether a layer calls this op, still torch's own, and nothing before it.

        Others may have put theirs in its place, and a convolution may pad first.
        """
        is_itself = vars(F).get(self.name) is self.function
        return is_itself and vars(module).get("padding_mode", "zeros") == "zeros"


def leaf_of(module: nn.Module) -> Leaf | None:
    """What the forward of a module does; None for all that is not just a layer of torch.nn."""
    leaf = LEAVES.get(type(module))
    return None if leaf is None or "_conv_forward" in vars(module) else leaf


def _of_linear(layer: Any, x: Tensor) -> tuple[Any, ...]:
    parameters = layer._parameters
    return x, parameters.get("weight"), parameters.get("bias")


def _of_convolution(layer: Any, x: Tensor) -> tuple[Any, ...]:
    return (*_of_linear(layer, x), layer.stride, layer.padding, layer.dilation, layer.groups)


LEAVES: dict[type[nn.Module], Leaf] = {
    nn.Linear: Leaf("linear", F.linear, _of_linear),
    nn.Conv1d: Leaf("conv1d", F.conv1d, _of_convolution),
    nn.Conv2d: Leaf("conv2d", F.conv2d, _of_convolution),
    nn.Conv3d: Leaf("conv3d", F.conv3d, _of_convolution),
    nn.BatchNorm1d: Leaf("batch_norm", F.batch_norm),
    nn.BatchNorm2d: Leaf("batch_norm", F.batch_norm),
    nn.BatchNorm3d: Leaf("batch_norm", F.batch_norm),
    nn.LayerNorm: Leaf("layer_norm", F.layer_norm),
    nn.GroupNorm: Leaf("group_norm", F.group_norm),
}
