"""The ops of compiled passes (rms_op and weights_op) by their formulas, for CPUs.

They are kernels of a GPU; tests/operators/test_rms_op.py and test_weights_op.py hold those to plain
torch. Where there is no GPU these stand in for them, so that what surrounds the ops is tested all
the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from virtualgrad.operators import kernels, rms_op, weights_op
from virtualgrad.operators.channels import Convolved, Total
from virtualgrad.operators.kernels_of_norms import Norm
from virtualgrad.operators.kernels_of_weights import plain
from virtualgrad.operators.rms_op import Kept
from virtualgrad.operators.running_sites import RunningSites
from virtualgrad.operators.statistic import accumulated


def factor(g: Tensor, kept: Kept) -> Tensor:
    """S / sqrt(r + eps), of the r of before or of the new one, whose candidate is written."""
    scale, rho, eps, loss_scale = kept.numbers
    e_before, m_before, last = kept.counts
    is_new = kept.graph[2] > last
    e, m = e_before + kept.elements, m_before + kept.samples
    ahead = torch.where((e_before > 0) & is_new, kept.candidate - rho * kept.r, 0.0)
    unit, unit_before = (m, m_before.clamp(min=1)) if kept.unit_is_sample else (1, 1)
    earlier = ahead * e_before / (unit_before**2 * (1 - rho))
    total = accumulated(g).square().sum(0) / loss_scale**2 + earlier
    updated = rho * kept.r + (1 - rho) * (unit * unit / e) * total
    kept.candidate.copy_(torch.where(is_new, updated, torch.nan))
    return scale * torch.rsqrt((kept.r if kept.stale else updated) + eps)


def transform(
    g: Tensor, kept: Kept, total: Total | None = None, *, may_pad: bool = False
) -> tuple[Tensor, Tensor | None]:
    """T(g), with longer rows where it may, and the sum of g or T(g) over all axes but the last."""
    wide = accumulated(g)
    product = wide * factor(g, kept)
    others = list(range(g.dim() - 1))
    summed = None if total is None else (wide if total == "g" else product).sum(others)
    if may_pad:  # nobody is to use what is behind
        product = torch.nn.functional.pad(product, (0, 3), value=torch.nan)
    return product.to(g.dtype), summed


def norm_sums(g: Tensor, norm: Norm, kept: Kept) -> Tensor:
    """The sums of g x^, g, T(g) x^ and T(g), as rows."""
    of_channel = (1, -1, *([1] * (g.dim() - 2)))
    x, mean, deviation, _ = norm
    hat = (x - mean.view(of_channel)) * deviation.view(of_channel)
    wide = accumulated(g)
    others = [axis for axis in range(g.dim()) if axis != 1]
    found = [(one * by).sum(others) for one in (wide, wide * factor(g, kept)) for by in (hat, 1)]
    return torch.stack(found)


def squares(g: Tensor, *, is_summed: bool = False) -> Tensor:
    """Sums of g^2, and of g, over parts of the rows; here, over all of them."""
    wide = accumulated(g).flatten(0, -2)
    found = [wide.square(), wide] if is_summed else [wide.square()]
    return torch.stack([one.sum(0, keepdim=True) for one in found])


def weight_gradient(
    g: Tensor,
    convolved: Convolved,
    r: Tensor | None,
    numbers: Tensor | None,
    *,
    with_squares: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of a convolution's weight under T, and sums of g^2 over halves of the batch."""
    factor = None
    if r is not None:
        assert numbers is not None
        factor = (numbers[0] * torch.rsqrt(r + numbers[2])).to(g.dtype)
    weight = plain(g, convolved, factor)[0]
    halves = accumulated(g).square().tensor_split(2) if with_squares else ()
    return weight, torch.stack([half.sum(0) for half in halves]) if halves else g.new_empty(0)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them stand in for the ops, in double precision, too."""
    monkeypatch.setattr(rms_op, "is_usable", lambda device: True)
    for function in (transform, norm_sums, squares):
        monkeypatch.setattr(rms_op, function.__name__, function)
    monkeypatch.setattr(weights_op, "is_usable", lambda device, dtype: True)
    monkeypatch.setattr(weights_op, "weight_gradient", weight_gradient)
    monkeypatch.setattr(kernels, "DTYPES", (torch.float64, *kernels.DTYPES))
    monkeypatch.setattr(RunningSites, "suits_kernels", lambda sites, key: True)
