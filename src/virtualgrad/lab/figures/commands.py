"""The three commands: measure, print the numbers, save the picture.

Each is a plain function for a Typer application: ``app.command()(lemma)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from virtualgrad.lab.figures import tables
from virtualgrad.lab.figures.crossing import measure_success, pick_paths
from virtualgrad.lab.figures.decrease import step_random_jacobians
from virtualgrad.lab.figures.decrease_networks import Labels, step_networks
from virtualgrad.lab.figures.decrease_plot import draw_decrease
from virtualgrad.lab.figures.isotropy import measure_isotropy
from virtualgrad.lab.figures.isotropy_plot import draw_isotropy
from virtualgrad.lab.figures.matrices import Law
from virtualgrad.lab.figures.taylor import map_error, network_error
from virtualgrad.lab.figures.valleys import METHODS, STEEPNESS, linear, random_starts
from virtualgrad.lab.figures.valleys_plot import draw_valleys

Seed = Annotated[int, typer.Option(help="Seed of everything random: same seed, same numbers.")]
Out = Annotated[Path, typer.Option(help="Folder for the picture; made if it is not there.")]
FIGURES = Path("figures")


def _norms(values: list[float] | None) -> list[float] | None:
    """Refuse what no matrix has as its norm; Typer's min= would let 0 and NaN pass."""
    for value in values or ():
        if not 0 < value < math.inf:
            raise typer.BadParameter(f"{value:g} is no norm: a finite number above 0.")
    return values


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Many small operations: a second thread costs more in waiting than it saves in work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def lemma(
    *,
    n: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Columns n of M. Repeat for more.", show_default="2, 4, 8"),
    ] = None,
    lam: Annotated[
        list[float] | None,
        typer.Option(
            callback=_norms, help="Norm lambda of M. Repeat for more.", show_default="0.5, 1, 2"
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs (v, u) per n and lambda.")] = 24,
    matrices: Annotated[int, typer.Option(min=2, help="Random matrices per pair.")] = 10_000,
    law: Annotated[Law, typer.Option(help="How ||M|| = lambda is read.")] = Law.CONDITIONED,
    seed: Seed = 0,
    out: Out = FIGURES,
) -> None:
    """Check the lemma: E[ v'M'M u, given ||M|| = lambda ] is proportional to v.u.

    Every point of the picture is one pair of unit vectors (v, u) with its
    own 10,000 random matrices M (2n x n). Printed for every n and lambda:
    the slope c0 of the line through the points and the origin, its standard
    error, and R^2; beside it c0 from the trace, E||M||_F^2 / n, and c0 in
    closed form.

    The lemma draws the entries of M from U(-inf, inf), which is no
    probability distribution. Two readings are: entries from U(-L, L) under
    the condition ||M|| = lambda, which is the same law for every L > lambda
    (--law conditioned, c0 known exactly); or entries from U(-1, 1), the
    matrix then scaled to norm lambda (--law scaled). Their c0 differ, the
    proportionality does not.
    """
    with _one_torch_thread():
        results = measure_isotropy(
            n or (2, 4, 8),
            lam or (0.5, 1.0, 2.0),
            pairs=pairs,
            matrices=matrices,
            law=law,
            seed=seed,
            workers=os.cpu_count() or 1,
        )
    tables.show(tables.isotropy(results, law, pairs, matrices))
    tables.saved(draw_isotropy(results, law, out))


def theorem(
    *,
    trials: Annotated[int, typer.Option(min=2, help="Steps with random Jacobians.")] = 40_000,
    networks: Annotated[int, typer.Option(min=2, help="Random MLPs of each kind.")] = 100,
    seed: Seed = 0,
    out: Out = FIGURES,
) -> None:
    """Check the theorem: on average, a small virtual-gradient step lowers the loss.

    With sigma = f(theta), M = dsigma/dtheta and g = dJ/dsigma, the step
    theta - alpha M'T(g) changes J by -alpha g'MM'T(g) + O(alpha^2). If M is
    random as in the lemma, the mean of that is -alpha c0 g.T(g) < 0: the
    corollary. Measured over alpha: how often a step lowers the loss, and
    the mean change over the corollary's prediction (1: as predicted).

    Random Jacobians: M random with norm 1, T a random positive diagonal
    (1:100 means elements spread over a factor 100), J a sum of log cosh.

    Random MLPs: the library's virtual gradient with T = identity, RMS and
    Sign, at the initialisation; c0 is ||M||_F^2 over the size of sigma,
    layer by layer. Labels are random, or those of a linear teacher.
    """
    alphas = [10 ** (k / 3) for k in range(-9, 5)]
    with _one_torch_thread():
        jacobians = [
            step_random_jacobians(spread, alphas, trials=trials, seed=seed)
            for spread in (1.0, 1e2, 1e4)
        ]
        mlps = [
            sweep
            for labels in Labels
            for sweep in step_networks(labels, alphas, networks=networks, seed=seed)
        ]
    for setting in dict.fromkeys(sweep.setting for sweep in [*jacobians, *mlps]):
        tables.show(tables.decrease([s for s in [*jacobians, *mlps] if s.setting == setting]))
    tables.saved(draw_decrease(jacobians, mlps, out))


def paths(
    *,
    starts: Annotated[int, typer.Option(min=2, help="Random starting points.")] = 100,
    seed: Seed = 0,
    out: Out = FIGURES,
) -> None:
    """Draw the first figure: theta and sigma on a loss with many local valleys.

    J = F(sigma) is a bowl with ripples of two sizes, k times steeper along
    sigma_1, and sigma = (theta_1 theta_2 / 2 - 2, theta_1 - theta_2). Three
    methods start from the same points: gradient descent, RMSProp (T acts on
    the gradient of theta) and virtual gradient descent (the same T acts on
    the gradient of sigma). First table: how many end in the deepest valley,
    each method at the best of 22 learning rates, for several k. The start
    drawn is one from which the virtual steps alone succeed.

    Second table: the Taylor error ||sigma(t+1) - f(theta(t+1))|| of one
    virtual step. It falls with alpha^2 (slope 2 in the log-log picture) for
    this f and for tanh MLPs, and is zero for a linear f.
    """
    start = random_starts(starts, seed)
    rates = [10 ** (k / 6) for k in range(-18, 4)]
    small = [10 ** (k / 2) for k in range(-8, -1)]
    with _one_torch_thread():
        success = [
            result
            for method in METHODS
            for result in measure_success(method, start, rates, (1 / 6, 1.0, STEEPNESS, 30.0))
        ]
        drawn = [result for result in success if result.k == STEEPNESS]
        lines = pick_paths(start, {result.method: result.good_and_small for result in drawn})
        errors = [
            network_error("tanh MLPs", small, seed=seed),
            map_error("this f", start, small),
            map_error("a linear f", start, small, linear),
        ]
    tables.show(tables.crossing(success))
    tables.show(tables.taylor(errors))
    tables.saved(draw_valleys(lines, drawn, errors, out))
