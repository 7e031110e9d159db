r"""Encapsulation 1, compiled: a linear layer on tokens, (N, ..., C), where T is an op of its own.

    sigma = x W^T + b;      g W to x,   T(g)^T x to W,   the sum of T(g) to b

An op that a compiler does not look into (:mod:`~virtualgrad.operators.rms_op`) wants its g in
memory, and so does the product with W. What comes first decides how g is made: for a product the
compiler makes it where it computes it, and the op then reads the same memory; for the op it would
make a copy. So the pull-back into x is written in front, and the op behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators import RMS, identity
from virtualgrad.operators.channels import Total
from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.plans import Plan
from virtualgrad.virtual.products import rows
from virtualgrad.virtual.rows import Rows, has_rows


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
        return None, grad_x, rows(seen).t() @ rows(x), grad_bias


class How(NamedTuple):
    """How T acts in the layer.

    Attributes:
        passed: T in this pass.
        only_seen: whether it only sees g: T's factor is known, and multiplies rows of theta.
        total: what the bias sums, if there is one: T(g), or the true g where T is not the bias'.
    """

    passed: InCompiledPass
    only_seen: bool
    total: Total | None


def run_by_tokens(call: Call, plan: Plan, sigma: Tensor) -> Tensor | None:
    """Run a linear layer on tokens, in a compiled pass; None where T or the op is of another kind.

    Args:
        call: the op.
        plan: the parts of its site.
        sigma: its value.
    """
    parts = [(site, operator) for site, operator in plan if operator is not identity]
    if call.rule.op != "linear" or len(parts) != 1 or sigma.dim() < 3:
        return None
    x, weight, bias = call.bound["input"], call.bound["weight"], call.bound.get("bias")
    if weight.dim() != 2 or (bias is not None and tuple(bias.shape) != (sigma.shape[-1],)):
        return None
    site, operator = parts[0]
    served = [use.argument for use in call.uses if use.parameter in site.parameters]
    if served not in (["weight"], ["weight", "bias"]):
        return None
    if not isinstance(operator, RMS) or not operator.is_plain:
        return None
    passed = InCompiledPass(operator, site, sigma)
    if not passed.sees_tokens(sigma):
        return None
    total: Total | None = None
    if bias is not None:
        total = "T(g)" if "bias" in served else "g"
    how = How(passed, has_rows(operator, site, sigma.dim() - 1), total)
    if how.only_seen:
        factor = passed.factor(sigma.dtype, sigma.device)
        weight = Rows.apply(factor, weight)
        bias = Rows.apply(factor, bias) if total == "T(g)" else bias
    # As autocast does, where it is on: sigma has its dtype.
    bias = None if bias is None else bias.to(sigma.dtype)
    result: Tensor = Tokens.apply(how, x.to(sigma.dtype), weight.to(sigma.dtype), bias)
    return result
