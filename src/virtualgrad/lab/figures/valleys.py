r"""The first figure, measured: J = F(sigma), sigma = f(theta), with many local valleys.

Both sequences of the paper, from virtual gradients that the library computes:

    theta(t+1) = theta(t) - alpha d,        d = M^T T g     (virtual_grad)
    sigma(t+1) = sigma(t) - alpha M d                       (M = d sigma / d theta)

Both planes are two-dimensional, so that they can be drawn. The map f is made of two ops that take
theta directly, each linear in theta_1 and in theta_2 but not in both together, as W_2 W_1 x is in
a network:

    f(theta) = (theta_1 theta_2 / 2 - 2, theta_1 - theta_2).

F is simple: its two elements do not mix. Each is a bowl with ripples of two sizes (c, w), one of
them k times as steep as the other:

    F(sigma) = k h(sigma_1) + h(sigma_2),     h(s) = s^2 / 2 + sum over ripples of c (1 - cos w s),

with its lowest point F = 0 at sigma = (0, 0), theta = (2, 2). In the plane of theta the same
valleys are bent and their scales mixed; so it matters where T acts, and three methods are compared:

* gradient descent: T = I;
* RMSProp: T = RMS, acting on the gradient of theta;
* virtual gradient descent: T = RMS, acting on the gradient of sigma.

T on sigma makes the descent blind to k; the other methods are measured by how they bear it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from virtualgrad import operators, virtual_grad
from virtualgrad.operators import Operator

STEEPNESS = 6.0
"""k, how much steeper F is along sigma_1."""

RIPPLES = ((0.25, 6.0), (0.02, 24.0))
"""(c, w) of the ripples: height and frequency."""

REACHED = 0.3
"""A path that ends with |sigma| below this has found the deepest valley."""

Map = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Method:
    """A descent method: which T, and on which gradient it acts.

    Attributes:
        name: for tables and pictures.
        operator: makes a fresh T.
        on_theta: T acts on the gradient of theta instead of that of sigma.
    """

    name: str
    operator: Callable[[], Operator]
    on_theta: bool = False


GRADIENT = Method("gradient", lambda: operators.identity)
RMSPROP = Method("RMSProp", operators.RMS, on_theta=True)
VIRTUAL = Method("virtual, RMS", operators.RMS)
METHODS = (GRADIENT, RMSPROP, VIRTUAL)


def bilinear(theta_1: Tensor, theta_2: Tensor) -> tuple[Tensor, Tensor]:
    """f(theta) = (theta_1 theta_2 / 2 - 2, theta_1 - theta_2); one op each."""
    minus_two = theta_1.new_tensor(-2.0)
    return torch.addcmul(minus_two, theta_1, theta_2, value=0.5), torch.sub(theta_1, theta_2)


def linear(theta_1: Tensor, theta_2: Tensor) -> tuple[Tensor, Tensor]:
    """A linear f, for which sigma(t) = f(theta(t)) holds at any alpha."""
    return torch.add(theta_1, theta_2), torch.sub(theta_1, theta_2)


def height(sigma_1: Tensor, sigma_2: Tensor, k: float | Tensor = STEEPNESS) -> Tensor:
    """F(sigma), one number for each pair of elements."""
    steep, gentle = _rippled_bowl(sigma_1), _rippled_bowl(sigma_2)
    return steep * k + gentle


def _rippled_bowl(s: Tensor) -> Tensor:
    ripples = [c * (1 - torch.cos(w * s)) for c, w in RIPPLES]
    return s.square() / 2 + torch.stack(ripples).sum(0)


@dataclass(frozen=True)
class Paths:
    """Many paths of one method.

    Attributes:
        theta: (steps + 1, paths, 2), theta(t).
        image: (steps + 1, paths, 2), f(theta(t)).
        sigma: (steps + 1, paths, 2), sigma(t) as the first-order iteration has it: sigma(t+1) comes
            from f(theta(t)), and sigma(0) = f(theta(0)).
    """

    theta: Tensor
    image: Tensor
    sigma: Tensor

    @property
    def reached(self) -> Tensor:
        """(paths,): which of them ended in the deepest valley."""
        return self.image[-1].square().sum(-1) < REACHED**2


def descend(
    start: Tensor,
    alpha: Tensor,
    method: Method,
    *,
    steps: int = 100,
    f: Map = bilinear,
    k: float | Tensor = STEEPNESS,
) -> Paths:
    """Follow theta(t) and sigma(t) from every start; alpha falls linearly to zero.

    Args:
        start: (paths, 2), theta(0). Each path has its own elements of sigma, and T acts on each
            element by itself: paths do not feel each other.
        alpha: (paths,), learning rate of the first step.
        method: which T, and where.
        steps: how many.
        f: the map theta -> sigma.
        k: steepness of F along sigma_1, one for all or (paths,).
    """
    operator = method.operator()
    thetas, moves = [start], []
    for t in range(steps):
        theta = [x.clone().requires_grad_() for x in thetas[-1].unbind(-1)]
        # x * 1 is an op of its own: behind it, T meets the gradient of theta.
        seen_by_f = [x * 1.0 for x in theta] if method.on_theta else theta
        loss = height(*f(*seen_by_f), k).sum()
        virtual = virtual_grad(loss, {"theta_1": theta[0], "theta_2": theta[1]}, operator)
        d = torch.stack([v for v in virtual if v is not None], -1)
        moves.append(-(alpha * (1 - t / steps))[:, None] * d)
        # A diverging path stays far away, but finite.
        thetas.append((thetas[-1] + moves[-1]).nan_to_num(1e3).clamp(-1e3, 1e3))
    path = torch.stack(thetas)
    image, jacobians = _map_and_jacobian(f, path)
    first_order = image[:-1] + (jacobians[:-1] * torch.stack(moves)[..., None, :]).sum(-1)
    return Paths(path, image, torch.cat([image[:1], first_order]))


def _map_and_jacobian(f: Map, theta: Tensor) -> tuple[Tensor, Tensor]:
    """f(theta) and M = d sigma / d theta at every point (..., 2)."""

    def at_one(point: Tensor) -> Tensor:
        return torch.stack(f(point[0], point[1]))

    points = theta.reshape(-1, 2)
    image: Tensor = vmap(at_one)(points)
    jacobians: Tensor = vmap(jacrev(at_one))(points)
    return image.view_as(theta), jacobians.view(*theta.shape, 2)


def random_starts(count: int, seed: int) -> Tensor:
    """(count, 2): theta uniform in [0.5, 3.5]^2, around the lowest point (2, 2)."""
    generator = torch.Generator().manual_seed(seed)
    return 0.5 + 3 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
