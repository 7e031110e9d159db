"""Encapsulation 1, layers whose node is one of C++, where :mod:`virtualgrad.native` was built.

Such a node asks here for T(g) in the plainest pass of all, unless an earlier one has left how it is
made (:mod:`virtualgrad.operators.native_transform`), and for everything in any other: then the
backward of the Function of Python runs in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.channels import Incoming, Total
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.native_transform import for_layer
from virtualgrad.virtual.convolutions import Convolution, Geometry
from virtualgrad.virtual.ops import Transform, Transforms
from virtualgrad.virtual.products import Linear, channels_of_rows

Gradients = tuple[Any, ...]
"""Of x, weight and bias; None where one is not asked for."""

Run = Callable[[Transforms, Tensor], Tensor]
"""(transforms, input) -> sigma."""


def native_layer(
    function: Any, others: tuple[Any, ...], shape: Geometry | None, python: Run
) -> Run | None:
    """A layer with a node of C++; None where there is none for its op, or none was built.

    Args:
        function: the Function of Python that it stands for.
        others: what that takes behind its input: weight and bias, as a rule.
        shape: of a convolution.
        python: runs the layer by that Function.
    """
    library = built() if function in (Linear, Convolution) else None
    if library is None or _is_traced_backward():
        return None
    if not all(other is None or type(other) in PLAIN for other in others):
        return None
    weight, bias = others
    run: Run
    if shape is None:
        run = library.Linear(weight, bias, python, _incoming_of_linear, _linear_by_python)
    else:
        of_g, by_python = _incoming_of_convolution(shape), _convolution_by_python(shape)
        run = library.Convolution(weight, bias, python, of_g, by_python, shape.in_backward)
    return run


def _is_traced_backward() -> bool:
    """Whether backward passes are to be compiled (compiled autograd), which sees no node of C++."""
    config = sys.modules.get("torch._dynamo.config")
    return bool(getattr(config, "compiled_autograd", False))


def _incoming_of_linear(  # noqa: PLR0917 - as C++ calls it
    transform: Transform, g: Tensor, x: Tensor, kernel: Any, in_rows: bool, total: Total | None
) -> Incoming:
    return for_layer(transform, g, channels_of_rows(g, in_rows, total))


def _incoming_of_convolution(shape: Geometry) -> Callable[..., Incoming]:
    def incoming(  # noqa: PLR0917 - as above
        transform: Transform, g: Tensor, x: Tensor, kernel: Any, in_rows: bool, total: Total | None
    ) -> Incoming:
        return for_layer(transform, g, shape.channels(x, kernel, in_rows, total))

    return incoming


def _linear_by_python(  # noqa: PLR0917 - as above
    saved: Any, needed: Any, transforms: Transforms, dtypes: Any, size: int, bias: Any, g: Tensor
) -> Gradients:
    ctx = _context(saved, (False, *needed), transforms)
    ctx.dtypes, ctx.size = dtypes, size
    return Linear.backward(ctx, g)[1:]


def _convolution_by_python(shape: Geometry) -> Callable[..., Gradients]:
    def gradients(  # noqa: PLR0917 - as above
        saved: Any,
        needed: Any,
        transforms: Transforms,
        dtypes: Any,
        size: int,
        bias: Any,
        g: Tensor,
    ) -> Gradients:
        ctx = _context(saved, (False, False, *needed), transforms)
        ctx.dtypes, ctx.shape = dtypes[:2], shape
        ctx.bias = None if bias is None else (bias, dtypes[2])
        return Convolution.backward(ctx, g)[2:]

    return gradients


def _context(saved: Any, needed: tuple[bool, ...], transforms: Transforms) -> SimpleNamespace:
    """What the backward of a Function asks of its ctx."""
    return SimpleNamespace(
        saved_tensors=saved,
        needs_input_grad=needed,
        next_functions=torch._C._current_autograd_node().next_functions,
        transforms=transforms,
    )
