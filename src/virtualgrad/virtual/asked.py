"""Encapsulation 1, what a backward pass asks for: which operands, and behind them which parameters.

``backward()`` asks for everything; ``backward(inputs=...)`` and ``torch.autograd.grad`` for some of
it. The engine knows, and is asked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

LEAF = "torch::autograd::AccumulateGrad"


def is_wanted(ctx: Any, operand: int, edges: Any = None) -> bool:
    """Whether this backward pass goes on to a tensor operand of a Function.

    ``torch.autograd.grad(loss, x)`` passes through the ops but asks for no parameter: T must not
    run then, nor learn from it. (``needs_input_grad`` only says what could be asked for.) A
    compiled backward pass computes everything that could be asked for.

    Args:
        ctx: of the Function.
        operand: which of its tensors.
        edges: its ``next_functions``, from one who has them already.
    """
    if edges is None and is_compiling():
        return bool(ctx.needs_input_grad[operand + 2])
    return will_reach((edges or ctx.next_functions)[operand][0])


def will_reach(node: Any) -> bool:
    """Whether this backward pass, not a compiled one, goes on to a node of its graph."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that torch.autograd.grad captures instead of executing
        return True


class Asked(NamedTuple):
    """The parameters into which a backward pass pulls T(g) of one site.

    Attributes:
        leaves: a number of each, its own as long as the graph lives.
        is_look: none of them gets it in ``.grad``: ``torch.autograd.grad`` hands it out.
    """

    leaves: frozenset[int]
    is_look: bool


def asked_behind(nodes: Iterable[Any]) -> Asked:
    """What a backward pass asks for behind some operands, which are views of parameters at most.

    It takes a walk to the leaves, so it is for graphs that are kept (``retain_graph=True``).
    """
    found: set[int] = set()
    is_look = True
    stack, seen = list(nodes), set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() != LEAF:
            stack.extend(following for following, _ in node.next_functions)
            continue
        try:
            is_executed = torch._C._will_engine_execute_node(node)
        except RuntimeError:  # captured, as above
            found.add(_number_of(node.variable))
            continue
        if is_executed:
            found.add(_number_of(node.variable))
            is_look = False
    return Asked(frozenset(found or {0}), is_look)  # 0: of a view itself


def _number_of(leaf: Tensor) -> int:
    """Its id; or where it lies, as the leaves that a reentrant checkpoint makes of its arguments.

    These are tensors of their own, others in each backward pass, in the memory of the parameters.
    """
    return -leaf.data_ptr() if type(leaf) is Tensor else id(leaf)
