"""Models for the tests, as data: every layer that is supported, and the ways users put them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

BATCH = 6


@dataclass(frozen=True)
class Case:
    """A model, its input, and how its batch lies."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    batch_dim: int = 0
    batch_size: int = BATCH


def floats(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape),)


def tokens(*shape: int, vocabulary: int = 7) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(0, vocabulary, shape),)


class Lambda(nn.Module):
    """A module with raw parameters and any forward."""

    def __init__(self, forward: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def raw(forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Lambda(forward, **{name: torch.randn(*shape) for name, shape in shapes.items()})


class Reused(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class Tied(nn.Module):
    """Embedding and output layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


class Residual(nn.Module):
    """In-place ReLU and in-place residual sums over convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleDict({"a": nn.BatchNorm2d(4), "b": nn.GroupNorm(2, 4)})
        self.gain = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms.values(), strict=True):
            y = F.relu(norm(layer(x)), inplace=True)
            y = (y * 1).mul_(self.gain)
            x = x + 0
            x += y
        return x.mean((2, 3))


class Cells(nn.Module):
    """A recurrent cell unrolled by hand."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class LoRA(nn.Module):
    """A frozen layer with a low-rank update written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 4)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 5))
        self.up = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + 0.5 * self.up @ self.down, self.base.bias)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Positions(nn.Module):
    """Token and position embeddings: the second has no sample axis."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 5)
        self.position = nn.Embedding(4, 5)
        self.scale = nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        return torch.tanh(self.token(x) + self.position(where)) * self.scale


def scaled_copy(m: nn.Module, x: Tensor) -> Tensor:
    """A copy of a parameter that another one scales and shifts, in place: it is W no more."""
    w = m.w.clone()
    w *= m.scale
    y = torch.tanh(x @ w)
    v = m.v.clone()
    v += m.shift
    return y @ v


def changed_copies(m: nn.Module, x: Tensor) -> Tensor:
    """Copies and casts that an op with no other parameter changes in place."""
    doubled = m.w.clone()
    doubled.mul_(2)
    centred = m.v.to(x.dtype, copy=True)
    centred.sub_(centred.mean(0))
    shifted = m.b.expand(x.shape).clone()
    shifted += x
    shifted /= 2
    return shifted @ doubled @ centred


def partly_overwritten(m: nn.Module, x: Tensor) -> Tensor:
    """Copies of which a part is overwritten, through an index or through a view of them."""
    first, second, third = m.w.clone(), m.w.clone(), m.w.clone()
    first[0] = 0
    second[1].exp_()
    third.t()[1].relu_()
    return x @ first + x @ second + x @ third + x @ m.w.clone()


def other_views(m: nn.Module, x: Tensor) -> Tensor:
    """Views by functions of several tensors, by the names of arguments, and of nothing new."""
    transposed = torch.transpose(input=m.w, dim0=0, dim1=1)
    shift, y = torch.broadcast_tensors(m.b, x @ transposed)
    row, (column, _) = torch.atleast_2d(m.b), torch.atleast_3d(m.b, x)
    whole = torch.atleast_2d(m.w).contiguous().requires_grad_()
    return (y + shift) * row * column.flatten() + x @ whole.t().requires_grad_()


def in_float(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: layer


CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(5, 4), floats(BATCH, 5)),
    "linear on sequences": Case(lambda: nn.Linear(5, 4), floats(BATCH, 3, 5)),
    "linear without bias": Case(lambda: nn.Linear(5, 4, bias=False), floats(BATCH, 2, 3, 5)),
    "linear without batch": Case(lambda: nn.Linear(5, 4), floats(5), batch_size=1),
    "linear, a bias of (1, C)": Case(
        raw(lambda m, x: F.linear(x, m.w, m.b), w=(4, 5), b=(1, 4)), floats(BATCH, 3, 5)
    ),
    "linear, a bias for all": Case(
        raw(lambda m, x: F.linear(x, m.w, m.b), w=(4, 5), b=(1,)), floats(BATCH, 3, 5)
    ),
    "linear by a vector": Case(raw(lambda m, x: F.linear(x, m.w), w=(5,)), floats(BATCH, 5)),
    "linear by a vector, sequences": Case(
        raw(lambda m, x: F.linear(x, m.w, m.b[0]), w=(5,), b=(1,)), floats(BATCH, 3, 5)
    ),
    "linear, time first": Case(lambda: nn.Linear(5, 4), floats(3, BATCH, 5), batch_dim=1),
    "bilinear": Case(
        lambda: nn.Bilinear(3, 4, 2), lambda: (torch.randn(BATCH, 3), torch.randn(BATCH, 4))
    ),
    "conv1d": Case(lambda: nn.Conv1d(4, 6, 3, stride=2, groups=2), floats(BATCH, 4, 9)),
    "conv2d": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, dilation=2), floats(BATCH, 2, 6, 5)),
    "conv2d same": Case(lambda: nn.Conv2d(2, 3, (5, 3), padding="same"), floats(BATCH, 2, 6, 5)),
    "conv2d circular": Case(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), floats(BATCH, 2, 6, 5)
    ),
    "conv2d reflect, no bias": Case(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=False),
        floats(BATCH, 2, 6, 5),
    ),
    "conv2d depthwise": Case(lambda: nn.Conv2d(3, 6, 3, groups=3), floats(BATCH, 3, 6, 5)),
    "conv2d without batch": Case(lambda: nn.Conv2d(2, 3, 3), floats(2, 6, 5), batch_size=2),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2), floats(BATCH, 2, 3, 4, 3)),
    "conv_transpose1d": Case(lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), floats(BATCH, 4, 5)),
    "conv_transpose2d": Case(
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), floats(BATCH, 2, 4, 3)
    ),
    "conv_transpose3d": Case(
        lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), floats(BATCH, 2, 3, 3, 3)
    ),
    "embedding": Case(lambda: nn.Embedding(7, 5, padding_idx=0), tokens(BATCH, 3)),
    "embedding bag": Case(lambda: nn.EmbeddingBag(7, 5), tokens(BATCH, 3)),
    "embedding bag, sum": Case(lambda: nn.EmbeddingBag(7, 5, mode="sum"), tokens(BATCH, 3)),
    "embedding bag, max": Case(lambda: nn.EmbeddingBag(7, 5, mode="max"), tokens(BATCH, 3)),
    "batch norm": Case(lambda: nn.BatchNorm1d(5), floats(BATCH, 5)),
    "batch norm 2d": Case(lambda: nn.BatchNorm2d(3), floats(BATCH, 3, 4, 2)),
    "batch norm 3d, eval": Case(lambda: nn.BatchNorm3d(3).eval(), floats(BATCH, 3, 2, 2, 2)),
    "layer norm": Case(lambda: nn.LayerNorm((3, 5)), floats(BATCH, 2, 3, 5)),
    "group norm": Case(lambda: nn.GroupNorm(2, 4), floats(BATCH, 4, 3)),
    "instance norm": Case(lambda: nn.InstanceNorm1d(4, affine=True), floats(BATCH, 4, 3)),
    "instance norm, running": Case(
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        floats(BATCH, 4, 3, 2),
    ),
    "rms norm": Case(lambda: nn.RMSNorm(5), floats(BATCH, 3, 5)),
    "prelu": Case(lambda: nn.PReLU(3), floats(BATCH, 3, 4)),
    "prelu, one slope": Case(nn.PReLU, floats(BATCH, 3, 4)),
    "attention": Case(lambda: Attention(batch_first=True), floats(BATCH, 3, 4), batch_dim=1),
    "attention, bias kv": Case(
        lambda: Attention(add_bias_kv=True), floats(3, BATCH, 4), batch_dim=1
    ),
    "attention, own dims": Case(
        lambda: Attention(kdim=4, vdim=4), floats(3, BATCH, 4), batch_dim=1
    ),
    "rnn cell": Case(lambda: Cells(nn.RNNCell(5, 3)), floats(BATCH, 2, 5)),
    "rnn cell, relu": Case(
        lambda: Cells(nn.RNNCell(5, 3, nonlinearity="relu", bias=False)), floats(BATCH, 2, 5)
    ),
    "lstm cell": Case(lambda: Cells(nn.LSTMCell(5, 3)), floats(BATCH, 3, 5)),
    "gru cell": Case(lambda: Cells(nn.GRUCell(5, 3)), floats(BATCH, 3, 5)),
    "raw matmul": Case(raw(lambda m, x: x @ m.w, w=(5, 4)), floats(BATCH, 3, 5)),
    "raw matmul, left": Case(raw(lambda m, x: m.w @ x, w=(4, 5)), floats(BATCH, 5, 3)),
    "raw matmul, vector": Case(raw(lambda m, x: x @ m.w, w=(5,)), floats(BATCH, 3, 5)),
    "raw matmul, left vector": Case(raw(lambda m, x: m.w @ x, w=(5,)), floats(BATCH, 5, 3)),
    "raw matmul, batched": Case(raw(lambda m, x: x @ m.w, w=(3, 5, 4)), floats(BATCH, 3, 2, 5)),
    "raw mm": Case(raw(lambda m, x: torch.mm(x, m.w.t()), w=(4, 5)), floats(BATCH, 5)),
    "raw mv": Case(raw(lambda m, x: torch.mv(x, m.w), w=(5,)), floats(BATCH, 5)),
    "raw mv, left": Case(
        raw(lambda m, x: x * torch.mv(m.w, m.v), w=(5, 3), v=(3,)), floats(BATCH, 5)
    ),
    "raw mv, as many rows as samples": Case(
        raw(lambda m, x: torch.tanh(m.w @ x.mean(0))[:5] * x, w=(BATCH, 5)), floats(BATCH, 5)
    ),
    "raw addmv": Case(
        raw(
            lambda m, x: torch.addmv(m.b, x, m.w).unsqueeze(1) * torch.addmv(m.c, m.u, m.v),
            b=(1,),
            w=(5,),
            c=(4,),
            u=(4, 3),
            v=(3,),
        ),
        floats(BATCH, 5),
    ),
    "raw addmm": Case(
        raw(lambda m, x: torch.addmm(m.b, x, m.w), b=(4,), w=(5, 4)), floats(BATCH, 5)
    ),
    "raw addmm, folded": Case(  # as GPT-2's Conv1D does it
        raw(
            lambda m, x: torch.addmm(m.b, x.view(-1, 5), m.w).view(BATCH, 3, 4),
            b=(4,),
            w=(5, 4),
        ),
        floats(BATCH, 3, 5),
    ),
    "raw baddbmm": Case(
        raw(lambda m, x: torch.baddbmm(m.b, x, m.w.expand(BATCH, 5, 4)), b=(3, 4), w=(5, 4)),
        floats(BATCH, 3, 5),
    ),
    "linear of expanded queries": Case(
        raw(lambda m, x: x @ F.linear(m.q.expand(BATCH, 3, 5), m.w).mT, q=(3, 5), w=(5, 5)),
        floats(BATCH, 2, 5),
    ),
    "linear of expanded queries, time first": Case(
        raw(
            lambda m, x: x * F.linear(m.q.unsqueeze(1).expand(3, BATCH, 5), m.w),
            q=(3, 5),
            w=(5, 5),
        ),
        floats(3, BATCH, 5),
        batch_dim=1,
    ),
    "matmul of an expanded row": Case(
        raw(lambda m, x: x * (m.q.expand(BATCH, 5) @ m.w), q=(1, 5), w=(5, 5)), floats(BATCH, 5)
    ),
    "einsum": Case(
        raw(lambda m, x: torch.einsum("btc,cd->btd", x, m.w), w=(5, 4)), floats(BATCH, 3, 5)
    ),
    "einsum, heads": Case(
        raw(lambda m, x: torch.einsum("bhqd,hde->bhqe", x, m.w), w=(2, 5, 4)),
        floats(BATCH, 2, 3, 5),
    ),
    "tensordot": Case(
        raw(lambda m, x: torch.tensordot(x, m.w, dims=1), w=(5, 4)), floats(BATCH, 3, 5)
    ),
    "raw scale and shift": Case(
        raw(lambda m, x: x * m.scale + m.shift, scale=(5,), shift=(3, 1)), floats(BATCH, 3, 5)
    ),
    "raw in place": Case(
        raw(
            lambda m, x: torch.sin((x * 1).mul_(m.scale).add_(m.up)).sub_(m.down),
            scale=(5,),
            up=(1,),
            down=(3, 1),
        ),
        floats(BATCH, 3, 5),
    ),
    "raw copies scaled in place": Case(
        raw(scaled_copy, w=(5, 4), scale=(4,), v=(4, 3), shift=(3,)), floats(BATCH, 5)
    ),
    "raw copies changed in place": Case(
        raw(changed_copies, w=(5, 4), v=(4, 3), b=(5,)), floats(BATCH, 5)
    ),
    "raw copies overwritten in part": Case(raw(partly_overwritten, w=(5, 4)), floats(BATCH, 5)),
    "raw views of several tensors": Case(raw(other_views, w=(4, 5), b=(4,)), floats(BATCH, 5)),
    "raw views": Case(
        raw(lambda m, x: x @ m.w.view(2, 5, 4)[1] + x @ m.w.chunk(2)[0], w=(10, 4)),
        floats(BATCH, 5),
    ),
    "raw split": Case(
        raw(
            lambda m, x: sum(torch.tanh(x @ w.t()) for w in m.w.split([2, 2])),
            w=(4, 5),
        ),
        floats(BATCH, 5),
    ),
    "raw cat": Case(
        raw(lambda m, x: torch.cat([m.w.expand(BATCH, 1, 5), x], 1), w=(1, 1, 5)),
        floats(BATCH, 3, 5),
    ),
    "raw stack": Case(
        raw(lambda m, x: x @ torch.stack([m.a, m.b]).t(), a=(5,), b=(5,)), floats(BATCH, 5)
    ),
    "raw index": Case(raw(lambda m, x: torch.tanh(m.w[x]), w=(7, 5)), tokens(BATCH, 3)),
    "raw index and slices": Case(
        raw(lambda m, x: torch.tanh(m.w[x, :]) * m.w[..., 1:][x, None, ...].sum(-1), w=(7, 5)),
        tokens(BATCH, 3),
    ),
    "raw index of pairs": Case(
        raw(lambda m, x: torch.tanh(m.w[x, (2 * x) % 7]) + m.w[x[:, :1], 1:][..., 0], w=(7, 7)),
        tokens(BATCH, 3),
    ),
    "raw index select": Case(
        raw(lambda m, x: torch.tanh(m.w.index_select(0, x)), w=(7, 5)), tokens(BATCH)
    ),
    "raw where": Case(
        raw(lambda m, x: torch.where(x > 0, x * m.a, m.b), a=(5,), b=(3, 5)), floats(BATCH, 3, 5)
    ),
    "raw lerp and addcmul": Case(
        raw(
            lambda m, x: torch.lerp(m.a, x, m.w) + torch.addcmul(m.a, x, m.b, value=0.5),
            a=(5,),
            b=(5,),
            w=(5,),
        ),
        floats(BATCH, 3, 5),
    ),
    "raw divide, negate": Case(
        raw(lambda m, x: x * (-m.w) + m.w / (2 + x.square()), w=(5,)), floats(BATCH, 3, 5)
    ),
    "raw reductions": Case(
        raw(lambda m, x: x * m.w.sum(0) + x * m.w.mean() + x @ m.w.cumsum(0).tril().t(), w=(5, 5)),
        floats(BATCH, 5),
    ),
    "weight twice in one op": Case(
        raw(lambda m, x: x @ (m.w @ m.w) + x * m.a * (m.a * m.a), w=(5, 5), a=(5,)),
        floats(BATCH, 5),
    ),
    "product of two weights": Case(
        raw(lambda m, x: x @ (m.u @ m.v), u=(5, 2), v=(2, 4)), floats(BATCH, 5)
    ),
    "nonlinear uses": Case(
        raw(lambda m, x: x * m.w.exp() + x @ torch.softmax(m.u, 0), w=(5,), u=(5, 5)),
        floats(BATCH, 5),
    ),
    "no sample axis": Case(Positions, tokens(BATCH, 4)),
    "reused": Case(Reused, floats(BATCH, 5)),
    "tied": Case(Tied, tokens(BATCH, 3)),
    "residual in place": Case(Residual, floats(BATCH, 3, 5, 4)),
    "lora": Case(LoRA, floats(BATCH, 5)),
    "weight norm": Case(lambda: parametrizations.weight_norm(nn.Linear(5, 4)), floats(BATCH, 5)),
    "spectral norm, eval": Case(
        lambda: parametrizations.spectral_norm(nn.Linear(5, 4)).eval(), floats(BATCH, 5)
    ),
    "parametrized": Case(lambda: _symmetric(nn.Linear(5, 5)), floats(BATCH, 5)),
    "transformer layer": Case(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False),
        floats(3, BATCH, 4),
        batch_dim=1,
    ),
    "sequential in sequential": Case(
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
            nn.Linear(6, 3),
        ),
        floats(BATCH, 5),
    ),
}
"""Name -> case, for every supported layer and pattern."""


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def _symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def loss_of(output: Tensor) -> Tensor:
    """A loss whose g differs from element to element, the mean over samples of a sum."""
    weights = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
    return (weights * output.square() + output.sin()).mean()
