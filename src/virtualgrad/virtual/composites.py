"""Torch functions that hide several ops: run piece by piece, so that each piece is a site.

``multi_head_attention_forward`` and the recurrent cells reach Python as one opaque call. The
pieces run in the same order with the same kernels as inside the call, so outputs stay the same to
the bit. Multi-step recurrent kernels (``nn.LSTM`` and its like) stay one op: not linear, by the
paper's rule.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The same code with another view of one global: torch's own function checks for overrides first,
# and would be handed back to the interceptor that called it, for ever.
multi_head_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
    F.multi_head_attention_forward.__closure__,
)
multi_head_attention.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__

CellWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _gates(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, *b: Tensor | None) -> list[Tensor]:
    b_ih, b_hh = b or (None, None)
    return [F.linear(h, w_hh, b_hh), F.linear(x, w_ih, b_ih)]


def rnn_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """h' = nonlinearity(W_hh h + b_hh + W_ih x + b_ih)."""

    def cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
        hidden, inputs = _gates(x, h, *weights)
        return nonlinearity(hidden + inputs)

    return cell


def lstm_cell(x: Tensor, state: tuple[Tensor, Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    """Gates i, f, c~, o from W_hh h + W_ih x; c' = f c + i c~; h' = o tanh(c')."""
    h, c = state
    if x.is_cuda:  # pragma: no cover - the kernel that torch's own cell uses there
        w_ih, w_hh, *biases = weights
        hidden, inputs = _gates(x, h, w_ih, w_hh)
        h_new, c_new, _ = torch._thnn_fused_lstm_cell(inputs, hidden, c, *biases)
        return h_new, c_new
    hidden, inputs = _gates(x, h, *weights)
    i, f, g, o = (hidden + inputs).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_new = f * c + i * g
    return o * c_new.tanh(), c_new


def gru_cell(x: Tensor, h: Tensor, *weights: Any) -> Tensor:
    """Gates r, z and n = tanh(i_n + r h_n) from W_hh h and W_ih x; h' = (h - n) z + n."""
    if x.is_cuda:  # pragma: no cover - the kernel that torch's own cell uses there
        w_ih, w_hh, *biases = weights
        hidden, inputs = _gates(x, h, w_ih, w_hh)
        return torch._thnn_fused_gru_cell(inputs, hidden, h, *biases)[0]
    hidden, inputs = _gates(x, h, *weights)
    h_r, h_z, h_n = hidden.chunk(3, 1)
    i_r, i_z, i_n = inputs.chunk(3, 1)
    r, z = (h_r + i_r).sigmoid(), (h_z + i_z).sigmoid()
    n = (i_n + h_n * r).tanh()
    return (h - n) * z + n


PIECEWISE: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention,
    torch.rnn_tanh_cell: rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rnn_cell(torch.relu),
    torch.lstm_cell: lstm_cell,
    torch.gru_cell: gru_cell,
}
"""Opaque torch function -> the same computation, piece by piece."""
