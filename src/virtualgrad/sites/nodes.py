"""Which autograd nodes are linear in which input: the knowledge of encapsulation 2.

Autograd records the computational graph G as nodes; ``node.next_functions`` lists, slot by slot,
where the gradients of a node's inputs go. A parameter is an ``AccumulateGrad`` node. A slot that
leads to one, directly or through transparent nodes (views, copies, casts), is a use of the
parameter, and the node's output is sigma.

This table knows nodes by name and is written independently of :mod:`.functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
AxesOf = Callable[[Any, int, Shape, Shape], set[int]]
"""(node, slot, shape of the input there, shape of sigma) -> axes of sigma that come from it."""


def broadcast(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """Axes along which an input, aligned at the last axis, has a size over 1."""
    first = len(sigma) - len(operand)
    return {first + i for i, size in enumerate(operand) if size > 1}


def every(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """All axes: sigma is made of the input alone."""
    return set(range(len(sigma)))


def last(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """The last axis."""
    return {len(sigma) - 1}


def channel(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """Axis 1 of (N, C, ...)."""
    return {1}


def trailing(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """As many axes at the end as the input has."""
    return set(range(len(sigma) - len(operand), len(sigma)))


def product(*axes_by_slot: int | None) -> AxesOf:
    """The axis that each factor of a matrix product makes, and its own batch axes before."""

    def axes(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
        own = axes_by_slot[slot]
        if own is None:
            return broadcast(node, slot, operand, sigma)
        factor_rank = 2
        batch = broadcast(node, slot, operand[:-factor_rank], sigma[:-factor_rank])
        is_expanded = operand[own] == 1 < sigma[own]
        return batch if is_expanded else {own % len(sigma)} | batch

    return axes


def vector(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """Matrix times vector: rows come from the matrix, nothing from the vector."""
    first = len(sigma) - len(operand[:-1])
    return {first + i for i, size in enumerate(operand[:-1]) if size == sigma[first + i]}


def added_vector(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """The same with an addend, which broadcasts, in the first slot."""
    rule = broadcast if slot == 0 else vector
    return rule(node, slot, operand, sigma)


def after_index(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """All axes but those that index tensors make: in their place, or, if apart, in front."""
    own, at = [], 0  # axes of the input that stay; which of them is looked at
    before: list[int] = []  # index tensors -> how many axes stay before each
    for index in node._saved_indices:
        if index is None:
            own.append(at)
            at += 1
        else:
            before.append(len(own))
            at += index.dim() if str(index.dtype) in {"torch.bool", "torch.uint8"} else 1
    stay = len(own) + len(operand) - at
    first = before[0] if len(set(before)) == 1 else 0
    made = range(first, first + len(sigma) - stay)
    return {axis for axis in range(len(sigma)) if axis not in made}


def selected(node: Any, slot: int, operand: Shape, sigma: Shape) -> set[int]:
    """All axes but the selected one."""
    dim = node._saved_dim
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim  # saved as an unsigned number
    return set(range(len(sigma))) - {dim % len(sigma)}


@dataclass(frozen=True)
class NodeRule:
    """Where a node is linear.

    Attributes:
        op: name of the op, as in :mod:`.functions` wherever one function makes one node.
        roles: slot -> what the input there is to the op; only slots in which it is linear. None:
            every slot, as a weight.
        axes: which axes of sigma come from the input in a slot.
        foldable: see :func:`.site.read_layout`.
        left: the slot of a left factor, whose rows are those of sigma.
    """

    op: str
    roles: Mapping[int, str] | None
    axes: AxesOf
    foldable: bool = True
    left: int | None = None

    def role(self, slot: int) -> str | None:
        """What the input in this slot is to the op; None where the op is not linear in it."""
        return "weight" if self.roles is None else self.roles.get(slot)


W, B = "weight", "bias"
LINEAR: dict[str, NodeRule] = {
    "AddmmBackward0": NodeRule("addmm", {0: B, 1: W, 2: W}, product(None, -2, -1), left=1),
    "MmBackward0": NodeRule("mm", {0: W, 1: W}, product(-2, -1), left=0),
    "BmmBackward0": NodeRule("bmm", {0: W, 1: W}, product(-2, -1), left=0),
    "BaddbmmBackward0": NodeRule("baddbmm", {0: B, 1: W, 2: W}, product(None, -2, -1), left=1),
    "MvBackward0": NodeRule("mv", {0: W, 1: W}, vector, left=0),
    "AddmvBackward0": NodeRule("mv", {0: B, 1: W, 2: W}, added_vector, left=1),
    "DotBackward0": NodeRule("dot", {0: W, 1: W}, vector),
    "LinearBackward0": NodeRule("linear", {1: W, 2: B}, last),
    "MkldnnLinearBackward0": NodeRule("linear", {1: W, 2: B}, last),
    "TrilinearBackward0": NodeRule("bilinear", {1: W}, last),
    "ConvolutionBackward0": NodeRule("convolution", {1: W, 2: B}, channel),
    "ConvolutionOverrideableBackward0": NodeRule("convolution", {1: W, 2: B}, channel),
    "EmbeddingBackward0": NodeRule("embedding", {0: W}, last, foldable=False),
    "EmbeddingBagBackward0": NodeRule("embedding_bag", {0: W}, last, foldable=False),
    "NativeBatchNormBackward0": NodeRule("batch_norm", {1: W, 2: B}, channel),
    "CudnnBatchNormBackward0": NodeRule("batch_norm", {1: W, 2: B}, channel),
    "MiopenBatchNormBackward0": NodeRule("batch_norm", {1: W, 2: B}, channel),
    "NativeGroupNormBackward0": NodeRule("group_norm", {1: W, 2: B}, channel),
    "NativeLayerNormBackward0": NodeRule("layer_norm", {1: W, 2: B}, trailing),
    "FusedRmsNormBackward0": NodeRule("rms_norm", {1: W}, trailing),
    "PreluKernelBackward0": NodeRule("prelu", {1: W}, broadcast),
    "MulBackward0": NodeRule("mul", {0: W, 1: W}, broadcast),
    "DivBackward0": NodeRule("div", {0: W}, broadcast),
    "AddBackward0": NodeRule("add", {0: B, 1: B}, broadcast),
    "SubBackward0": NodeRule("sub", {0: B, 1: B}, broadcast),
    "RsubBackward0": NodeRule("sub", {0: B, 1: B}, broadcast),
    "RsubBackward1": NodeRule("sub", {0: B}, broadcast),
    "NegBackward0": NodeRule("neg", {0: W}, every),
    "LerpBackward0": NodeRule("lerp", {0: W, 1: W}, broadcast),
    "LerpBackward1": NodeRule("lerp", {0: W, 1: W, 2: W}, broadcast),
    "AddcmulBackward0": NodeRule("addcmul", {0: B, 1: W, 2: W}, broadcast),
    "AddcdivBackward0": NodeRule("addcdiv", {0: B, 1: W}, broadcast),
    "WhereBackward0": NodeRule("where", {0: W, 1: W}, broadcast),
    "MaskedFillBackward0": NodeRule("masked_fill", {0: W}, broadcast),
    "CatBackward0": NodeRule("cat", None, broadcast),
    "StackBackward0": NodeRule("stack", None, every),
    "IndexBackward0": NodeRule("index", {0: W}, after_index, foldable=False),
    "IndexSelectBackward0": NodeRule("index_select", {0: W}, selected, foldable=False),
    "SumBackward0": NodeRule("sum", {0: W}, every),
    "SumBackward1": NodeRule("sum", {0: W}, every),
    "MeanBackward0": NodeRule("mean", {0: W}, every),
    "MeanBackward1": NodeRule("mean", {0: W}, every),
    "CumsumBackward0": NodeRule("cumsum", {0: W}, every),
    "TrilBackward0": NodeRule("tril", {0: W}, every),
    "TriuBackward0": NodeRule("triu", {0: W}, every),
    "FlipBackward0": NodeRule("flip", {0: W}, every),
    "RollBackward0": NodeRule("roll", {0: W}, every),
    "RepeatBackward0": NodeRule("repeat", {0: W}, every),
}
"""Name of the node -> where it is linear."""

_TRANSPARENT_NAMES = """
    T Transpose Permute View Reshape ReshapeAlias UnsafeView Squeeze Unsqueeze Expand Slice Select
    Split SplitWithSizes UnsafeSplit Unbind Narrow Diagonal AsStrided Unfold Clone ToCopy Alias
"""
TRANSPARENT = frozenset(
    f"{name}Backward{overload}" for name in _TRANSPARENT_NAMES.split() for overload in range(4)
)
"""Views, copies and casts: the parameter is still itself behind them."""
