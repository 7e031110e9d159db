"""Encapsulation 1, compiled: what layers whose T is an op of its own have in common."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from virtualgrad.operators import RMS, identity
from virtualgrad.operators.channels import Total
from virtualgrad.operators.rms_compiled import InCompiledPass
from virtualgrad.sites import Site
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.plans import Plan
from virtualgrad.virtual.rows import Rows, has_rows


class LayerPart(NamedTuple):
    """The one part of a layer's site on which T acts: on its weight, and maybe on its bias.

    Attributes:
        site: the part.
        rms: T.
        total: what the bias sums, if there is one: T(g), or the true g where T is not the bias'.
    """

    site: Site
    rms: RMS
    total: Total | None


class How(NamedTuple):
    """How T acts in a layer.

    Attributes:
        passed: T in this pass.
        only_seen: whether it only sees g: T's factor is known, and multiplies rows of theta.
        total: as above.
    """

    passed: InCompiledPass
    only_seen: bool
    total: Total | None


def only_part(call: Call, plan: Plan) -> LayerPart | None:
    """The one part of a layer's site on which T acts; None if T is of another kind, or in parts.

    Args:
        call: the op, with a weight and maybe a bias.
        plan: the parts of its site.
    """
    parts = [(site, operator) for site, operator in plan if operator is not identity]
    if len(parts) != 1:
        return None
    site, operator = parts[0]
    served = [use.argument for use in call.uses if use.parameter in site.parameters]
    if served not in (["weight"], ["weight", "bias"]):
        return None
    if not isinstance(operator, RMS) or not operator.is_plain:
        return None
    if call.bound.get("bias") is None:
        return LayerPart(site, operator, None)
    return LayerPart(site, operator, "T(g)" if "bias" in served else "g")


def how_in(part: LayerPart, passed: InCompiledPass, axis: int) -> How:
    """How T acts, with the channels along an axis of sigma."""
    return How(passed, has_rows(part.rms, part.site, axis), part.total)


def operands(call: Call, how: How, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight and bias as the op takes them: of sigma's dtype, as autocast does it.

    Where T multiplies the rows of weight and bias, they are told so.
    """
    x, weight, bias = call.bound["input"], call.bound["weight"], call.bound.get("bias")
    if how.only_seen:
        factor = how.passed.factor()
        weight = Rows.apply(factor, weight)
        bias = Rows.apply(factor, bias) if how.total == "T(g)" else bias
    bias = None if bias is None else bias.to(sigma.dtype)
    return x.to(sigma.dtype), weight.to(sigma.dtype), bias
