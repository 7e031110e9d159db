"""Encapsulation 1, layers whose node is one of C++, where :mod:`virtualgrad.native` was built.

Such a node asks here for T(g) in the plainest pass of all, unless an earlier one has left how it is
made (:mod:`virtualgrad.operators.native_transform`), and for everything in any other: then the
backward of the Function of Python runs in its place. (Norms ask in :mod:`.native_norms`.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.channels import Incoming, Total
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.native_transform import for_layer
from virtualgrad.virtual.convolutions import Convolution, Geometry
from virtualgrad.virtual.layer_norms import LayerNorm
from virtualgrad.virtual.marks import Marked
from virtualgrad.virtual.native_contexts import Gradients, Run, context
from virtualgrad.virtual.native_norms import native_batch_norm, native_layer_norm
from virtualgrad.virtual.norms import BatchNorm
from virtualgrad.virtual.ops import Transform, Transforms
from virtualgrad.virtual.products import Linear, channels_of_rows


def native_layer(
    function: Any, others: tuple[Any, ...], shape: Geometry | None, python: Run
) -> Run | None:
    """A layer with a node of C++; None where there is none for its op, or none was built.

    Args:
        function: the Function of Python that it stands for.
        others: what that takes behind its input: weight and bias first.
        shape: of a convolution.
        python: runs the layer by that Function.
    """
    make = _MADE_IN_CPP.get(function)
    library = None if make is None else built()
    if make is None or library is None or _is_traced_backward():
        return None
    tensors = [other for other in others if isinstance(other, Tensor)]
    if not all(type(tensor) in PLAIN or isinstance(tensor, Marked) for tensor in tensors):
        return None
    return make(library, others if shape is None else (*others, shape), python)


def _is_traced_backward() -> bool:
    """Whether backward passes are to be compiled (compiled autograd), which sees no node of C++."""
    config = sys.modules.get("torch._dynamo.config")
    return bool(getattr(config, "compiled_autograd", False))


def _native_linear(library: ModuleType, others: tuple[Any, ...], python: Run) -> Run:
    run: Run = library.Linear(*others, python, _incoming_of_linear, _linear_by_python)
    return run


def _native_convolution(library: ModuleType, others: tuple[Any, ...], python: Run) -> Run:
    weight, bias, shape = others
    of_g, by_python = _incoming_of_convolution(shape), _convolution_by_python(shape)
    run: Run = library.Convolution(weight, bias, python, of_g, by_python, shape.in_backward)
    return run


_MADE_IN_CPP: dict[Any, Callable[[ModuleType, tuple[Any, ...], Run], Run | None]] = {
    Linear: _native_linear,
    Convolution: _native_convolution,
    BatchNorm: native_batch_norm,
    LayerNorm: native_layer_norm,
}
"""Function of Python -> what makes a layer of C++ of the library and what stands behind its x."""


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
    saved: Any, needed: Any, transforms: Transforms, g: Tensor, dtypes: Any, size: int, bias: Any
) -> Gradients:
    ctx = context(saved, (False, *needed), transforms)
    ctx.dtypes, ctx.size = dtypes, size
    return Linear.backward(ctx, g)[1:]


def _convolution_by_python(shape: Geometry) -> Callable[..., Gradients]:
    def gradients(  # noqa: PLR0917 - as above
        saved: Any,
        needed: Any,
        transforms: Transforms,
        g: Tensor,
        dtypes: Any,
        size: int,
        bias: Any,
    ) -> Gradients:
        ctx = context(saved, (False, False, *needed), transforms)
        ctx.dtypes, ctx.shape = dtypes[:2], shape
        ctx.bias = None if bias is None else (bias, dtypes[2])
        return Convolution.backward(ctx, g)[2:]

    return gradients
