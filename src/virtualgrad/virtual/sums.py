r"""Encapsulation 1, compiled: the weight and the bias of a norm, by sums over the samples.

There sigma = w x^ + b, number by number, and the gradients of w and b are sums of T(g) x^ and T(g)
over samples n and positions p. T multiplies by an f that no sample changes, so

    dJ/dw = sum over p of f_p (sum over n of g_np x^_np),    dJ/db = sum over p of f_p (sum of g_np)

The inner sums are made where the statistic, the sum of g^2 over n, is made: in one pass over g.
T(g), as large as sigma, is never made, nor waited for where r is updated first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from virtualgrad.operators import RMS
from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.ops import map_arguments
from virtualgrad.virtual.plans import Plan

NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm")
"""Ops whose sigma is w x^ + b."""


class Sums(torch.autograd.Function):
    """sigma itself; in backward g itself to it, and the sums above to weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        passed: InCompiledPass,
        arguments: Sequence[str],
        sigma: Tensor,
        normalized: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Return sigma; compilers want another tensor, and make none."""
        ctx.passed, ctx.arguments = passed, arguments
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        ctx.save_for_backward(normalized)
        return sigma.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return g, and the gradients of the parameters."""
        (normalized,) = ctx.saved_tensors
        times = [normalized if name == "weight" else None for name in ctx.arguments]
        sums = ctx.passed.sums(g, times)
        found = [one.to(dtype) for one, dtype in zip(sums, ctx.dtypes, strict=True)]
        return None, None, g, None, *found


def run_by_sums(call: Call, plan: Plan, sigma: Tensor) -> Tensor | None:
    """Run a norm by its sums, in a compiled pass; None where T or the op is of another kind.

    Args:
        call: the op.
        plan: the parts of its site.
        sigma: its value, with the parameters held fixed.
    """
    if call.rule.op not in NORMS or len(plan) != 1 or sigma.is_complex():
        return None
    site, operator = plan[0]
    if not isinstance(operator, RMS) or not operator.is_plain:
        return None
    layout = operator.layout_at(site)
    if layout.sample_axis is None or site.shape != layout.view:
        return None
    affine = [call.bound.get(name) for name in ("weight", "bias")]
    parameters = [use.tensor for use in call.uses]
    if len(parameters) != len(site.parameters) or affine[0] is affine[1]:
        return None
    # In the precision in which norms compute: of a sigma in bfloat16, x^ has more digits.
    wide = torch.promote_types(sigma.dtype, torch.float32)

    def bare(tensor: Tensor) -> Any:
        if tensor is affine[0] or tensor is affine[1]:
            return None
        return tensor.detach().to(wide)  # the input, or a running mean or variance

    args, kwargs = map_arguments(call.args, call.kwargs, bare)
    normalized = (call.rule.pull_back or call.function)(*args, **kwargs)
    passed = InCompiledPass(operator, site, sigma)
    arguments = [use.argument for use in call.uses]
    result: Tensor = Sums.apply(passed, arguments, sigma, normalized, *parameters)
    return result
