"""Paths over the valleys, against the methods written out by hand; and Taylor's formula."""

import math

import pytest
import torch

from virtualgrad.lab.figures.crossing import Success, measure_success, pick_paths
from virtualgrad.lab.figures.taylor import fit_slope, map_error, network_error
from virtualgrad.lab.figures.valleys import (
    GRADIENT,
    METHODS,
    RIPPLES,
    RMSPROP,
    STEEPNESS,
    VIRTUAL,
    bilinear,
    descend,
    height,
    linear,
    random_starts,
)

START = random_starts(6, seed=3)
ALPHA = torch.full((6,), 0.05, dtype=torch.float64)
RHO, EPS = 0.9, 1e-6


def map_and_jacobian(theta):
    a, b = theta.unbind(-1)
    sigma = torch.stack([a * b / 2 - 2, a - b], -1)
    rows = [
        torch.stack([b / 2, a / 2], -1),
        torch.stack([torch.ones_like(a), -torch.ones_like(a)], -1),
    ]
    return sigma, torch.stack(rows, -2)


def gradient_of_height(sigma):
    slope = sigma + sum(c * w * torch.sin(w * sigma) for c, w in RIPPLES)
    return slope * torch.tensor([STEEPNESS, 1.0])


def by_hand(method, steps):
    """theta(t), with the update of each method as the books have it."""
    theta, r, thetas = START, torch.zeros_like(START), [START]
    for t in range(steps):
        sigma, m = map_and_jacobian(theta)
        g = gradient_of_height(sigma)
        if method is not VIRTUAL:
            g = (m.mT @ g[..., None])[..., 0]
        if method is not GRADIENT:
            r = RHO * r + (1 - RHO) * g * g
            g = g / torch.sqrt(r + EPS)
        if method is VIRTUAL:
            g = (m.mT @ g[..., None])[..., 0]
        theta = theta - (ALPHA * (1 - t / steps))[:, None] * g
        thetas.append(theta)
    return torch.stack(thetas)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_paths_are_those_of_the_method_written_out(method):
    paths = descend(START, ALPHA, method, steps=5)
    torch.testing.assert_close(paths.theta, by_hand(method, 5))
    torch.testing.assert_close(paths.image, map_and_jacobian(paths.theta)[0])


def test_sigma_follows_its_own_first_order_iteration():
    paths = descend(START, ALPHA, VIRTUAL, steps=5)
    sigma, m = map_and_jacobian(paths.theta[:-1])
    moved = (m @ paths.theta.diff(dim=0)[..., None])[..., 0]
    torch.testing.assert_close(paths.sigma[1:], sigma + moved)
    torch.testing.assert_close(paths.sigma[0], paths.image[0])


def test_lowest_point():
    zero = torch.zeros(1, dtype=torch.float64)
    assert height(zero, zero).item() == 0
    two = torch.full((1,), 2.0)
    assert [s.item() for s in bilinear(two, two)] == [0, 0]
    assert (height(*torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))) > 0).all()


def test_virtual_steps_do_not_see_how_steep_the_loss_is_along_sigma():
    gentle, steep = (descend(START, ALPHA, VIRTUAL, steps=3, k=k).theta for k in (1.0, 30.0))
    torch.testing.assert_close(gentle, steep, rtol=1e-3, atol=1e-3)


def test_a_diverging_path_stays_finite():
    paths = descend(START, 1e3 * ALPHA, GRADIENT, steps=20)
    assert paths.image.isfinite().all()
    assert not paths.reached.any()


def test_success_counts_the_paths_of_every_alpha_and_steepness():
    alphas = (0.003, 0.3)
    for method in METHODS:
        results = measure_success(method, START, alphas, (1.0, STEEPNESS))
        assert [result.k for result in results] == [1, STEEPNESS]
        one_by_one = [
            descend(START, torch.full((6,), a, dtype=torch.float64), method).reached.double().mean()
            for a in alphas
        ]
        assert list(results[1].reached) == [part.item() for part in one_by_one]


def test_best_and_legible_alpha():
    success = Success(GRADIENT, 1.0, 10, (0.1, 0.2, 0.3), (0.5, 0.7, 0.8))
    assert success.best == (0.3, 0.8)
    assert success.good_and_small == 0.2


def test_picked_paths_share_their_start():
    picked = pick_paths(random_starts(30, 0), {GRADIENT: 0.02, RMSPROP: 0.3, VIRTUAL: 0.15})
    starts = [paths.theta[0, 0].tolist() for paths in picked.values()]
    assert starts[0] == starts[1] == starts[2]
    assert [paths.reached.item() for paths in picked.values()] == [False, False, True]


def test_taylor_error_is_half_alpha_squared_times_the_step():
    """f is quadratic: ||f(theta) - alpha M d - f(theta - alpha d)|| = alpha^2 |d_1 d_2| / 2."""
    alphas = (1e-3, 1e-2, 1e-1)
    result = map_error("f", START, alphas)
    d = (descend(START, torch.ones_like(ALPHA), VIRTUAL, steps=1).theta.diff(dim=0))[0]
    expected = [alpha**2 * d.prod(-1).abs().mean().item() / 2 for alpha in alphas]
    assert result.errors == pytest.approx(expected)
    assert result.slope == pytest.approx(2, abs=1e-6)


def test_taylor_error_of_a_linear_map_is_zero():
    result = map_error("f", START, (1e-3, 1.0), linear)
    assert max(result.errors) < 1e-14
    assert result.slope is None


def test_taylor_error_of_networks_falls_with_alpha_squared():
    result = network_error("MLPs", (1e-4, 1e-3, 1e-2), networks=3)
    assert result.slope == pytest.approx(2, abs=0.02)


def test_slope_of_a_power():
    alphas = (0.1, 0.2, 0.4)
    assert fit_slope("", alphas, [a**3 for a in alphas]).slope == pytest.approx(3)
    assert math.isclose(fit_slope("", alphas, [5 * a for a in alphas]).slope, 1)
