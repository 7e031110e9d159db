r"""How large gradients, virtual gradients and steps are, parameter by parameter, over some batches.

With s = 1, and r as it would stand after many steps from here,

    T(g) = g / sqrt(r + eps),          r = mean over the batches of (1/m) sum over samples of g^2,

the virtual gradient V of a parameter is scale-free: SVGD's step is lr * scale * V where T acts, and
lr * gradient elsewhere. Sizes are Euclidean norms, root mean square over the batches. Two passes
over the batches: the first finds gradients and r, the second V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad.errors import LossError, ModelError
from virtualgrad.operators import RMS, RMSSettings
from virtualgrad.operators.finite import accumulation_dtype
from virtualgrad.settings.batches import LossFunction, loss_of, random_numbers_kept, samples_in
from virtualgrad.settings.current import Current
from virtualgrad.sites import Site, weights_only
from virtualgrad.virtual import virtual_grad

RHO, EPS = 0.9, 1e-6
"""Those of the paper, which :meth:`virtualgrad.SVGD.released` has."""


@dataclass(frozen=True)
class Size:
    """How large things are at one parameter.

    Attributes:
        name: of the parameter.
        weight: norm of the parameter.
        gradient: norm of the plain gradient.
        virtual: norm of V, the pull-back of T(g) with s = 1; None where no T acts.
        step: norm of the current optimizer's step.
        linear: share of the numbers of r that lie below eps, where T is nearly g / sqrt(eps); None
            where no T acts.
    """

    name: str
    weight: float
    gradient: float
    virtual: float | None
    step: float
    linear: float | None


class _Watch(RMS):
    """T = identity that keeps the mean of g^2 over all batches: r without a decay."""

    def __init__(self) -> None:
        super().__init__(per_sample=False, settings=self._weights)
        self.batches = 0

    def _weights(self, site: Site) -> RMSSettings:
        # r <- (1 - 1/k) r + (1/k) g^2 in batch k makes r the mean of the first k.
        return RMSSettings(1.0, 1 - 1 / max(self.batches, 1), EPS)

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        super().__call__(g, site)
        return g


def measure(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    current: Current,
) -> list[Size]:
    """Sizes at every parameter that the current optimizer trains and the loss depends on.

    Args:
        model: a plain model that may be changed: its buffers will be.
        loss_fn: the loss of a batch.
        batches: some batches.
        current: the optimizer at work.

    Raises:
        ModelError: No parameter is the weight of a product or a convolution.
        LossError: The loss depends on none of the parameters.
    """
    named = {name: p for name, p in model.named_parameters() if name in current.rates}
    watch = _Watch()
    squares = {  # in float32 at least: the square of a small bfloat16 or float16 number is none
        name: torch.zeros(p.shape, dtype=accumulation_dtype(p.dtype), device=p.device)
        for name, p in named.items()
    }
    with random_numbers_kept(model, batches[0]):
        for batch in batches:
            watch.batches += 1
            for name, gradient in _gradients(model, loss_fn, batch, named, watch).items():
                squares[name] += _square(gradient, squares[name].dtype) / len(batches)
    fixed = RMS(
        per_sample=False,
        stale=True,
        settings=lambda site: RMSSettings(1.0, 1.0, EPS),  # rho = 1: r stays as it is
    )
    fixed.state = {key: dict(tensors) for key, tensors in watch.state.items()}
    transformed = _Names(fixed)
    virtual = dict.fromkeys(named, 0.0)
    with random_numbers_kept(model, batches[0]):  # the same random numbers as in the first pass
        for batch in batches:
            for name, v in _gradients(model, loss_fn, batch, named, transformed).items():
                virtual[name] += _norm(v) ** 2 / len(batches)
    used = [name for name in named if squares[name].sum() > 0]
    _require_sites(model, transformed.roots, used)
    return [
        Size(
            name,
            weight=_norm(named[name]),
            gradient=math.sqrt(float(squares[name].sum())),
            virtual=math.sqrt(virtual[name]) if name in transformed.roots else None,
            step=current.step_size(name, squares[name]),
            linear=transformed.linear(name),
        )
        for name in used
    ]


class _Names:
    """An operator that notes at which parameters it acts, and the r that it divides by."""

    def __init__(self, operator: RMS) -> None:
        self.operator = operator
        self.roots: dict[str, dict[str, Tensor]] = {}  # parameter -> site -> r

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        for name in site.parameters:
            self.roots.setdefault(name, {})[site.key] = self.operator.state[site.key]["r"]
        return self.operator(g, site)

    def linear(self, name: str) -> float | None:
        """The share of r that lies below eps, at all sites of a parameter."""
        if name not in self.roots:
            return None
        r = torch.cat([tensor.flatten() for tensor in self.roots[name].values()])
        return float((r < EPS).double().mean())


def _gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    named: Mapping[str, Tensor],
    operator: Any,
) -> dict[str, Tensor]:
    """Virtual gradients of one batch; a parameter that the loss does not depend on is left out."""
    with torch.enable_grad():
        loss = loss_of(model, loss_fn, batch)
    found = virtual_grad(
        loss,
        named,
        operator,
        where=weights_only,
        allow_unused=True,
        batch_size=samples_in(batch),
    )
    return {
        name: (g.to_dense() if g.is_sparse else g).detach()
        for name, g in zip(named, found, strict=True)
        if g is not None
    }


def _square(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return (gradient.abs() if gradient.is_complex() else gradient).to(dtype).square()


def _norm(tensor: Tensor) -> float:
    dtype = accumulation_dtype(tensor.dtype)
    size = tensor.abs() if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(size.detach(), dtype=dtype))


def _require_sites(model: nn.Module, transformed: Mapping[str, Any], used: Sequence[str]) -> None:
    if not used:
        raise LossError.of(
            given="a loss whose gradient is zero at every parameter that is trained",
            allowed="a loss that depends on the parameters",
            todo="look at loss_fn, and at which parameters current has",
        )
    if not transformed:
        raise ModelError.of(
            given=f"{type(model).__name__}, in which no product or convolution takes a parameter",
            allowed="a model with linear layers or convolutions: elsewhere SVGD.released is SGD",
            todo="keep the current optimizer, or use SVGD(model, ...), whose T acts on every "
            "linear op",
        )
