"""Encapsulation 1, what a node of C++ gives the backward of Python that runs in its place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from virtualgrad.virtual.ops import Transforms

Gradients = tuple[Any, ...]
"""Of x, weight and bias; None where one is not asked for."""

Run = Callable[[Transforms, Tensor], Tensor]
"""(transforms, input) -> sigma."""


def context(saved: Any, needed: tuple[bool, ...], transforms: Transforms) -> SimpleNamespace:
    """What the backward of any Function asks of its ctx."""
    return SimpleNamespace(
        saved_tensors=saved,
        needs_input_grad=needed,
        next_functions=torch._C._current_autograd_node().next_functions,
        transforms=transforms,
    )
