"""Random matrices of given norm, against closed forms and rejection sampling."""

import pytest
import torch

from virtualgrad.lab.figures.matrices import Law, exact_c0, random_matrices, spectral_norm

SHAPES = [(4, 2), (2, 4), (3, 3), (1, 3), (5, 1)]
COUNT = 20_000


def draw(law: Law, m: int, n: int, seed: int = 0) -> torch.Tensor:
    return random_matrices(law, COUNT, m, n, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("law", Law)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_the_norm_is_one(law, m, n):
    norms = torch.linalg.matrix_norm(draw(law, m, n)[:500], ord=2)
    torch.testing.assert_close(norms, torch.ones(500), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_spectral_norm_is_the_largest_singular_value(m, n):
    matrices = torch.randn(50, m, n, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.linalg.svdvals(matrices)[:, 0]
    torch.testing.assert_close(spectral_norm(matrices), expected)


def test_closed_form_in_the_cases_one_can_see():
    assert exact_c0(m=7, n=1, lam=3.0) == 9.0  # M'M is the number lambda^2
    assert exact_c0(m=1, n=4, lam=2.0) == 1.0  # one row of length lambda, in any direction
    # Transposing M keeps the Frobenius norm.
    assert 3 * exact_c0(m=5, n=3) == pytest.approx(5 * exact_c0(m=3, n=5))


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_conditioned_law_has_the_c0_of_the_closed_form(m, n):
    squares = draw(Law.CONDITIONED, m, n).square().sum((-2, -1)).double() / n
    error = squares.std().item() / COUNT**0.5
    assert abs(squares.mean().item() - exact_c0(m, n)) <= 4 * error + 1e-6


@pytest.mark.parametrize("edge", [1.0, 1.4])
def test_conditioned_law_is_what_rejection_leaves_of_a_uniform_one_of_any_width(edge):
    """Entries from U(-L, L), kept if ||M|| <= 1, then moved out to ||M|| = 1."""
    generator = torch.Generator().manual_seed(1)
    cube = edge * (2 * torch.rand(40 * COUNT, 2, 2, generator=generator).double() - 1)
    norms = spectral_norm(cube)
    kept = cube[norms <= 1] / norms[norms <= 1][:, None, None]
    squares = kept.square().sum((-2, -1)) / 2
    assert len(kept) > COUNT
    assert abs(squares.mean().item() - exact_c0(2, 2)) < 4 * squares.std() / len(kept) ** 0.5


@pytest.mark.parametrize("law", Law)
def test_the_mean_of_the_gram_matrix_is_a_multiple_of_the_identity(law):
    matrices = draw(law, 6, 3).double()
    grams = matrices.mT @ matrices
    mean, error = grams.mean(0), grams.std(0) / COUNT**0.5
    c0 = matrices.square().sum((-2, -1)).mean() / 3  # the trace identity
    assert ((mean - c0 * torch.eye(3)).abs() < 4 * error).all()


def test_the_two_laws_differ():
    conditioned, scaled = (draw(law, 6, 3).square().sum((-2, -1)).mean() for law in Law)
    assert conditioned > 1.1 * scaled
