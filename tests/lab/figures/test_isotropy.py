"""The lemma's estimates, against closed forms."""

import pytest
import torch

from virtualgrad.lab.figures.isotropy import fit_through_origin, measure_isotropy, random_pair
from virtualgrad.lab.figures.matrices import Law


@pytest.mark.parametrize("law", Law)
def test_for_one_column_c0_is_lambda_squared(law):
    for result in measure_isotropy((1,), (0.5, 3.0), pairs=5, matrices=100, law=law):
        assert result.fit.slope == pytest.approx(result.lam**2, rel=1e-5)
        assert result.fit.r_squared == pytest.approx(1, abs=1e-6)
        assert result.trace == pytest.approx(result.lam**2, rel=1e-5)


def test_slope_agrees_with_the_closed_form_and_the_trace():
    results = measure_isotropy((2, 3), (0.5, 2.0), pairs=20, matrices=2000, seed=1)
    assert [(result.n, result.lam) for result in results] == [(2, 0.5), (2, 2), (3, 0.5), (3, 2)]
    for result in results:
        assert abs(result.fit.slope - result.exact) < 4 * result.fit.error
        assert result.trace == pytest.approx(result.exact, rel=0.01)
        assert result.fit.r_squared > 0.999
        assert result.fit.error < 0.02 * result.exact


def test_c0_of_the_scaled_law_has_no_closed_form_but_grows_with_lambda_squared():
    half, double = measure_isotropy((3,), (0.5, 2.0), pairs=10, matrices=2000, law=Law.SCALED)
    assert half.exact is None
    error = 16 * half.fit.error + double.fit.error
    assert abs(double.fit.slope - 16 * half.fit.slope) < 4 * error


def test_result_depends_on_the_seed_and_not_on_the_threads():
    def run(seed: int, workers: int) -> list:
        return measure_isotropy((2,), (1.0,), pairs=4, matrices=50, seed=seed, workers=workers)

    assert run(0, 1) == run(0, 3)
    assert run(0, 1) != run(1, 1)


def test_pairs_are_unit_vectors():
    generator = torch.Generator().manual_seed(0)
    for n in (2, 5):
        v, u = random_pair(n, generator)
        torch.testing.assert_close(torch.stack([v.norm(), u.norm()]), torch.ones(2))


def test_fit_of_points_on_a_line():
    x = torch.tensor([-1.0, 2.0, 3.0])
    fit = fit_through_origin(x, 0.5 * x, torch.full((3,), 0.1))
    assert fit.slope == 0.5
    assert fit.r_squared == 1
    assert fit.error == pytest.approx(0.1 / 14**0.5)
