r"""How well sigma(t) = f(theta(t)) holds: the error of one step against alpha.

From sigma(t) = f(theta(t)), one step of each sequence leaves, by Taylor's formula,

    ||sigma(t+1) - f(theta(t+1))|| = ||f(theta) - alpha M d - f(theta - alpha d)|| = O(alpha^2),

d = M^T T g being the virtual gradient; and nothing where f is linear. For the f of :mod:`.valleys`
it is alpha^2 |d_1 d_2| / 2 exactly, since f is quadratic. A network is the harder case: there sigma
are all its pre-activations, and f has derivatives of every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.functional import jvp
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from virtualgrad import operators, virtual_grad
from virtualgrad.lab.figures.decrease_networks import HIDDEN, Labels, random_mlp, random_task
from virtualgrad.lab.figures.valleys import VIRTUAL, Map, bilinear, descend


@dataclass(frozen=True)
class TaylorError:
    """||sigma(t+1) - f(theta(t+1))|| by alpha.

    Attributes:
        label: what f is.
        alphas: the learning rates.
        errors: mean over the starts.
        slope: of log error against log alpha, by least squares; the paper says 2. None where the
            errors are rounding only.
    """

    label: str
    alphas: tuple[float, ...]
    errors: tuple[float, ...]
    slope: float | None


def fit_slope(label: str, alphas: Sequence[float], errors: Sequence[float]) -> TaylorError:
    """Fit log error = slope log alpha + constant."""
    rounding = 1e-13
    if max(errors) < rounding:
        return TaylorError(label, tuple(alphas), tuple(errors), None)
    x, y = torch.tensor([list(alphas), list(errors)], dtype=torch.float64).log()
    x = x - x.mean()
    slope = ((x * y).sum() / x.square().sum()).item()
    return TaylorError(label, tuple(alphas), tuple(errors), slope)


def map_error(label: str, start: Tensor, alphas: Sequence[float], f: Map = bilinear) -> TaylorError:
    """One step of virtual gradient descent from every start, over the plane.

    Args:
        label: what f is.
        start: (starts, 2), theta(t).
        alphas: the learning rates.
        f: the map theta -> sigma.
    """
    errors = []
    for alpha in alphas:
        rates = start.new_full((len(start),), alpha)
        paths = descend(start, rates, VIRTUAL, steps=1, f=f)
        errors.append((paths.sigma[1] - paths.image[1]).norm(dim=-1).mean().item())
    return fit_slope(label, alphas, errors)


def network_error(
    label: str, alphas: Sequence[float], *, networks: int = 12, seed: int = 0
) -> TaylorError:
    """One step of virtual gradient descent (RMS) of random MLPs.

    Args:
        label: what f is.
        alphas: the learning rates.
        networks: how many.
        seed: of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    rates = torch.tensor(alphas, dtype=torch.float64)
    errors = torch.zeros_like(rates)
    for trial in range(networks):
        network = random_mlp(HIDDEN[trial % len(HIDDEN)], generator)
        x, y = random_task(Labels.TEACHER, generator)
        errors += _errors_of_one(network, x, y, rates) / networks
    return fit_slope(label, alphas, errors.tolist())


def _errors_of_one(network: nn.Sequential, x: Tensor, y: Tensor, rates: Tensor) -> Tensor:
    theta = dict(network.named_parameters())
    loss = cross_entropy(network(x), y)
    virtual = virtual_grad(loss, theta, operators.RMS())
    d = tuple(v for v in virtual if v is not None)
    fixed = tuple(parameter.detach() for parameter in theta.values())

    def f(*parameters: Tensor) -> Tensor:
        return pre_activations(network, dict(zip(theta, parameters, strict=True)), x)

    sigma, m_d = jvp(f, fixed, d)

    def error(alpha: Tensor) -> Tensor:
        after = f(*(p - alpha * v for p, v in zip(fixed, d, strict=True)))
        difference: Tensor = sigma - alpha * m_d - after
        return difference.square().sum().sqrt()

    errors: Tensor = vmap(error)(rates)
    return errors


def pre_activations(network: nn.Sequential, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Sigma: the outputs of all linear layers, in one vector."""
    outputs = []
    for name, layer in network.named_children():
        prefix = f"{name}."
        own = {k.removeprefix(prefix): p for k, p in parameters.items() if k.startswith(prefix)}
        x = functional_call(layer, own, (x,))
        if isinstance(layer, nn.Linear):
            outputs.append(x.flatten())
    return torch.cat(outputs)
