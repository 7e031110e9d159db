"""Torch functions that hide several ops: run piece by piece, so that each piece is a site.

Functions of ``torch.nn.functional`` that are written in Python (multi-head attention, normalize)
and the recurrent cells reach an interceptor as one opaque call. The pieces run in the same order,
in place where the call does, with the same kernels, so outputs stay the same to the bit.
Multi-step recurrent kernels (``nn.LSTM`` and its like) stay one op: not linear, by the paper's
rule.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing

_COMPOSED_IN = (vars(F), vars(torch.functional))
_NO_OVERRIDES = dict.fromkeys(
    ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
    lambda *tensors: False,
)


class _Inside:
    """Torch's own Python functions without their check for overrides, an attribute each."""


_inside = _Inside()


@settled_while_tracing
def _prepare_python_function(function: Any) -> str | None:
    """Put torch's own Python function, without its check, into an attribute; None for any other.

    The check would hand the call back to the interceptor that makes it, for ever. The result has
    the same code, with another view of the globals that hold the check.
    """
    if not isinstance(function, types.FunctionType):
        return None
    if function is torch.functional.meshgrid:  # it asks in a function that it calls
        return None
    if not any(function.__globals__ is composed for composed in _COMPOSED_IN):
        return None
    name = f"{function.__module__}.{function.__qualname__}".replace(".", "_")
    if not hasattr(_inside, name):
        inside = types.FunctionType(
            function.__code__,
            {**function.__globals__, **_NO_OVERRIDES},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        inside.__kwdefaults__ = function.__kwdefaults__
        setattr(_inside, name, inside)
    return name


def _gates(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, *b: Tensor | None) -> list[Tensor]:
    b_ih, b_hh = b or (None, None)
    return [F.linear(h, w_hh, b_hh), F.linear(x, w_ih, b_ih)]


def rnn_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """H' = nonlinearity(W_hh h + b_hh + W_ih x + b_ih)."""

    def cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
        hidden, inputs = _gates(x, h, *weights)
        return nonlinearity(hidden.add_(inputs))

    return cell


def lstm_cell(x: Tensor, state: tuple[Tensor, Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    """Gates i, f, c~, o from W_hh h + W_ih x; c' = f c + i c~; h' = o tanh(c')."""
    h, c = state
    if x.is_cuda:  # pragma: no cover - the kernel that torch's own cell uses there
        w_ih, w_hh, *biases = weights
        hidden, inputs = _gates(x, h, w_ih, w_hh)
        fused_lstm: Any = torch.ops.aten._thnn_fused_lstm_cell
        h_new, c_new, _ = fused_lstm(inputs, hidden, c, *biases)
        return h_new, c_new
    hidden, inputs = _gates(x, h, *weights)
    i, f, g, o = hidden.add_(inputs).unsafe_chunk(4, 1)
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    c_new = (f * c).add_(i * g)
    return o * c_new.tanh(), c_new


def gru_cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    """Gates r, z and n = tanh(i_n + r h_n) from W_hh h and W_ih x; h' = (h - n) z + n."""
    if x.is_cuda:  # pragma: no cover - the kernel that torch's own cell uses there
        w_ih, w_hh, *biases = weights
        hidden, inputs = _gates(x, h, w_ih, w_hh)
        fused_gru: Any = torch.ops.aten._thnn_fused_gru_cell
        h_new: Tensor = fused_gru(inputs, hidden, h, *biases)[0]
        return h_new
    hidden, inputs = _gates(x, h, *weights)
    h_r, h_z, h_n = hidden.unsafe_chunk(3, 1)
    i_r, i_z, i_n = inputs.unsafe_chunk(3, 1)
    r, z = h_r.add_(i_r).sigmoid_(), h_z.add_(i_z).sigmoid_()
    n = i_n.add(h_n.mul_(r)).tanh_()
    return (h - n).mul_(z).add_(n)


_CELLS: dict[Any, Callable[..., Any]] = {
    torch.rnn_tanh_cell: rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rnn_cell(torch.relu),
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
}


def pieces_of(function: Any) -> Callable[..., Any] | None:
    """The same computation as an opaque torch function, piece by piece; None without pieces."""
    cell = _CELLS.get(function)
    if cell is not None:
        return cell
    name = _prepare_python_function(function)
    return None if name is None else getattr(_inside, name)
