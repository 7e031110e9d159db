r"""Encapsulation 1, compiled: the weight and the bias of a norm, by sums over the samples.

There sigma = w x^ + b, number by number, and the gradients of w and b are sums of T(g) x^ and T(g)
over samples n and positions p. T multiplies by an f that no sample changes, so

    dJ/dw = sum over p of f_p (sum over n of g_np x^_np),    dJ/db = sum over p of f_p (sum of g_np)

The inner sums are made where the statistic, the sum of g^2 over n, is made: in one pass over g.
T(g), as large as sigma, is never made, nor waited for where r is updated first. Of a batch norm in
training, with weight and bias, of channels-last images on a GPU, they are made by an op of our own
(:mod:`~virtualgrad.operators.rms_op`), and those for the input's gradient with them: a compiler
puts the sums of many layers that share a g into one kernel, of few programs and long loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators import RMS, kernels
from virtualgrad.operators.kernels_of_norms import Norm, pull_back
from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.ops import map_arguments
from virtualgrad.virtual.plans import Plan

NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm")
"""Ops whose sigma is w x^ + b."""


class How(NamedTuple):
    """How the sums are made.

    Attributes:
        passed: T in this pass.
        arguments: what the parameters are called.
    """

    passed: InCompiledPass
    arguments: Sequence[str]


class Sums(torch.autograd.Function):
    """sigma itself; in backward g itself to it, and the sums above to weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, how: How, sigma: Tensor, normalized: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Return sigma; compilers want another tensor, and make none."""
        ctx.how = how
        ctx.kinds = [(parameter.shape, parameter.dtype) for parameter in parameters]
        ctx.save_for_backward(normalized)
        return sigma.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return g, and the gradients of the parameters."""
        passed, arguments = ctx.how
        (normalized,) = ctx.saved_tensors
        times = [normalized if name == "weight" else None for name in arguments]
        return None, g, None, *_as_parameters(passed.sums(g, times), ctx.kinds)


class NormByOp(torch.autograd.Function):
    """sigma, of the op's own; in backward all gradients of a batch norm, by sums that an op makes.

    The compiler would sum g and g x^ once more for the input's, in a pass of its own.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - apply takes no keywords
        ctx: Any,
        passed: InCompiledPass,
        sigma: Tensor,
        x: Tensor,
        mean: Tensor,
        deviation: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Return sigma, as above."""
        ctx.passed = passed
        ctx.kinds = [(parameter.shape, parameter.dtype) for parameter in (weight, bias)]
        # A copy, which costs a compiler nothing unless x is overwritten later: nobody would notice.
        ctx.save_for_backward(x.clone(), mean, deviation, weight)
        return sigma.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input, the weight and the bias."""
        norm = Norm(*ctx.saved_tensors)
        of_product, of_g, *of_parameters = ctx.passed.norm_sums(g, norm).unbind()
        pulled = pull_back(g, norm, of_product, of_g)
        parameters = _as_parameters(of_parameters, ctx.kinds)
        return None, None, pulled, None, None, *parameters


def _as_parameters(sums: Sequence[Tensor], kinds: Sequence[tuple[Any, Any]]) -> list[Tensor]:
    """The sums with the shapes and dtypes of the parameters.

    An axis of one number counts as none: of one channel there is a lone sum.
    """
    return [one.to(dtype).reshape(shape) for one, (shape, dtype) in zip(sums, kinds, strict=True)]


def run_by_sums(call: Call, plan: Plan, sigma: Tensor) -> Tensor | None:
    """Run a norm by its sums, in a compiled pass; None where T or the op is of another kind.

    Args:
        call: the op.
        plan: the parts of its site.
        sigma: its value, with the parameters held fixed.
    """
    if not _is_norm(call.rule.op) or len(plan) != 1 or sigma.is_complex():
        return None
    if not call.bound["input"].requires_grad:
        return None  # no node of the norm's own would notice an input that is overwritten later
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
    passed = InCompiledPass(operator, site, sigma)
    arguments = [use.argument for use in call.uses]
    result: Tensor
    norm = _normalized_by_batch(call, arguments, passed, sigma)
    if norm is not None:
        result = NormByOp.apply(passed, sigma.detach(), *norm, *parameters)
    else:
        result = Sums.apply(How(passed, arguments), sigma, _normalized(call, sigma), *parameters)
    return result


@settled_while_tracing
def _is_norm(op: str) -> bool:
    return op in NORMS


def _normalized(call: Call, sigma: Tensor) -> Tensor:
    """x^, in the precision in which norms compute: of a sigma in bfloat16 it has more digits."""
    affine = [call.bound.get(name) for name in ("weight", "bias")]
    wide = torch.promote_types(sigma.dtype, torch.float32)

    def bare(tensor: Tensor) -> Any:
        if tensor is affine[0] or tensor is affine[1]:
            return None
        return tensor.detach().to(wide)  # the input, or a running mean or variance

    args, kwargs = map_arguments(call.args, call.kwargs, bare)
    normalized: Tensor = (call.rule.pull_back or call.function)(*args, **kwargs)
    return normalized


def _normalized_by_batch(
    call: Call, arguments: Sequence[str], passed: InCompiledPass, sigma: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """x, mean and 1 / deviation of a batch norm in training; None where no op makes the sums.

    In the words in which compilers decompose a batch norm: they compute the two once.
    """
    if call.rule.op != "batch_norm" or arguments != ["weight", "bias"]:
        return None
    if passed.rms.share_positions or not call.bound.get("training", False):
        return None
    if not passed.sees_images(sigma):
        return None
    x = call.bound["input"]
    if x.dtype not in kernels.DTYPES or x.numel() == 0:
        return None
    others = [axis for axis in range(x.dim()) if axis != 1]
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, others, correction=0, keepdim=True)
    deviation = torch.rsqrt(variance + call.bound.get("eps", 1e-5))
    return x, mean.flatten(), deviation.flatten()
