r"""Encapsulation 1, compiled: a linear layer on tokens, (N, ..., C), where T is an op of its own.

    sigma = x W^T + b;      g W to x,   T(g)^T x to W,   the sum of T(g) to b

An op that a compiler does not look into (:mod:`~virtualgrad.operators.rms_op`) wants its g in
memory, and so does the product with W. What comes first decides how g is made: for a product the
compiler makes it where it computes it, and the op then reads the same memory; for the op it would
make a copy. So the pull-back into x is written in front, and the op behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.compiled_layers import How, how_in, only_part, operands
from virtualgrad.virtual.plans import Plan
from virtualgrad.virtual.products import rows


class Tokens(torch.autograd.Function):
    """The layer; T acts on g, or, where the rows of theta are multiplied instead, only sees it."""

    @staticmethod
    def forward(ctx: Any, how: How, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run F.linear."""
        ctx.how = how
        ctx.save_for_backward(x, weight)
        return torch._C._nn.linear(x, weight, bias)  # as in .products

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        grad_x = (rows(g) @ weight).reshape(x.shape)  # in front
        how = ctx.how
        seen, grad_bias = how.passed.for_tokens(g, only_seen=how.only_seen, total=how.total)
        if grad_bias is not None:
            grad_bias = grad_bias.to(g.dtype)
        elif how.total is not None:
            grad_bias = rows(seen if how.total == "T(g)" else g).sum(0)
        grad_weight = rows(seen).t() @ rows(x)
        return None, grad_x, grad_weight[: weight.shape[0]], grad_bias  # seen may have longer rows


def run_by_tokens(call: Call, plan: Plan, sigma: Tensor) -> Tensor | None:
    """Run a linear layer on tokens, in a compiled pass; None where T or the op is of another kind.

    Args:
        call: the op.
        plan: the parts of its site.
        sigma: its value.
    """
    if call.rule.op != "linear" or sigma.dim() < 3 or call.bound["weight"].dim() != 2:
        return None
    bias = call.bound.get("bias")
    if bias is not None and tuple(bias.shape) != (sigma.shape[-1],):
        return None
    part = only_part(call, plan)
    if part is None:
        return None
    passed = InCompiledPass(part.rms, part.site, sigma)
    if not passed.sees_tokens(sigma):
        return None
    how = how_in(part, passed, sigma.dim() - 1)
    result: Tensor = Tokens.apply(how, *operands(call, how, sigma))
    return result
