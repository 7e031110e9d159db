r"""Random matrices M with a given spectral norm: what the lemma may mean by its condition.

The lemma takes the entries of M iid from U(-inf, inf) and conditions on ||M||_2 = lambda. There is
no such distribution: a constant density on the whole line has no finite mass, and without the
condition the expectations of the corollary and the theorem do not exist. Two readings do:

* **conditioned**: entries iid from U(-L, L), any L > lambda, conditioned on ||M||_2 = lambda. As
  ||M||_2 <= lambda forces |M_ij| <= lambda < L, the edge of the cube is out of reach and the
  conditional law is the same for every L; so the limit L -> inf exists, and this is it: the
  surface measure that the volume of R^(m x n) leaves on the sphere ||M||_2 = lambda.
* **scaled**: entries iid from U(-1, 1), the matrix then multiplied by lambda / ||M||_2. L cancels
  here too, but the corners of the cube are more likely than under the condition.

Both laws stay the same under swaps and sign changes of columns, which is all that the proof needs:
E[M^T M] is c0 I in both, with a different c0.

**Sampling the first.** The upper left m x n block of a random orthogonal matrix of size N has the
density det(I - M^T M)^((N-m-n-1)/2) on the ball ||M||_2 <= 1. With N = m + n + 1 that is constant,
and a point of a ball with constant density, moved out to the sphere, has the law wanted.

**Its c0.** In that law the other squared singular values x_2, ..., x_n (of lambda = 1) have the
density prod x_i^((m-n-1)/2) (1 - x_i) prod_(i<j) |x_i - x_j|. Aomoto's extension of Selberg's
integral gives E[x_i] = (m - 1) / (m + n + 1), hence with n c0 = E||M||_F^2

    c0 = lambda^2 / n * (1 + (n - 1)(m - 1) / (m + n + 1)).
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Law(StrEnum):
    """Which distribution ||M||_2 = lambda means; see the module."""

    CONDITIONED = "conditioned"
    SCALED = "scaled"


def random_matrices(law: Law, count: int, m: int, n: int, generator: torch.Generator) -> Tensor:
    """Draw (count, m, n) independent matrices M with ||M||_2 = 1.

    Args:
        law: how the condition is read.
        count: how many matrices.
        m: rows, the size of sigma where M is a Jacobian.
        n: columns, the size of theta.
        generator: source of randomness.
    """
    draw = _uniform_in_ball if law is Law.CONDITIONED else _uniform_in_cube
    matrices = draw(count, m, n, generator)
    return matrices.div_(spectral_norm(matrices)[:, None, None])


def spectral_norm(matrices: Tensor) -> Tensor:
    """||M||_2 of a batch, from the smaller of M^T M and M M^T: faster than singular values."""
    wide = matrices.shape[-2] < matrices.shape[-1]
    gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    return eigenvalues[..., -1].sqrt()


def exact_c0(m: int, n: int, lam: float = 1.0) -> float:
    """c0 of E[M^T M | ||M||_2 = lambda] = c0 I under the conditioned law, in closed form.

    Args:
        m: rows of M.
        n: columns of M.
        lam: lambda.
    """
    return lam**2 / n * (1 + (n - 1) * (m - 1) / (m + n + 1))


def _uniform_in_ball(count: int, m: int, n: int, generator: torch.Generator) -> Tensor:
    """Constant density on ||M||_2 <= 1: the first m rows of m + n + 1 orthonormal ones."""
    gaussian = torch.randn(count, m + n + 1, n, generator=generator)
    # G = Q R with R^T R = G^T G, so the rows of Q wanted are those of G times R^-1.
    r = torch.linalg.cholesky(gaussian.mT @ gaussian).mT
    matrices: Tensor = torch.linalg.solve_triangular(r, gaussian[:, :m], upper=True, left=False)
    return matrices


def _uniform_in_cube(count: int, m: int, n: int, generator: torch.Generator) -> Tensor:
    """Entries iid from U(-1, 1)."""
    return 2 * torch.rand(count, m, n, generator=generator) - 1
