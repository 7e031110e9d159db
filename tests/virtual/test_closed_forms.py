"""The virtual gradient by its definition, where both encapsulations could be wrong together.

Sigma is written out by hand, and which of its axes counts samples is stated, not found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Lambda, loss_of
from torch import Tensor

from virtualgrad import virtual_grad
from virtualgrad.operators import RMS
from virtualgrad.virtual import Attachment, Intercept, named_parameters

BATCH, WIDTH = 8, 4
RHO, EPS = 0.9, 1e-6


@dataclass(frozen=True)
class Closed:
    """A model in two halves, and what is to be found at the cut.

    Attributes:
        sigma: (model, input) -> the output of the one op that takes the parameters.
        rest: (sigma, input) -> the output of the model.
        sample_axis: the axis of sigma that counts samples; None where there is none.
        shapes: of the parameters, by their names.
    """

    sigma: Callable[[Any, Tensor], Tensor]
    rest: Callable[[Tensor, Tensor], Tensor]
    sample_axis: int | None
    shapes: dict[str, tuple[int, ...]]

    def model(self) -> Lambda:
        parameters = {name: torch.randn(shape) for name, shape in self.shapes.items()}
        return Lambda(lambda model, x: self.rest(self.sigma(model, x), x), **parameters)

    def by_definition(self, model: Lambda, x: Tensor) -> tuple[Tensor, ...]:
        """D^T T(g), with g of a backward pass that ends at sigma."""
        sigma = self.sigma(model, x)
        cut = sigma.detach().requires_grad_()
        (g,) = torch.autograd.grad(loss_of(self.rest(cut, x)), cut)
        return torch.autograd.grad(sigma, list(model.parameters()), self.transformed(g))

    def transformed(self, g: Tensor) -> Tensor:
        """T(g) of Algorithm 1 in its first step."""
        squares = g.square()
        if self.sample_axis is not None:  # g is that of a mean over as many samples
            squares = g.shape[self.sample_axis] * squares.sum(self.sample_axis, keepdim=True)
        return g / ((1 - RHO) * squares + EPS).sqrt()


def scaled(sigma: Tensor, x: Tensor) -> Tensor:
    """The input, scaled by a value for the whole batch, or by one for each sample."""
    return torch.tanh(sigma.flatten()[:WIDTH]) * x


def itself(sigma: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(sigma) * x.sum(1).view(-1, *([1] * (sigma.dim() - 1)))


FIXED = torch.linspace(-1.0, 1.0, 3, dtype=torch.float64)

CLOSED: dict[str, Closed] = {
    "matrix @ vector": Closed(lambda m, x: m.w @ FIXED, scaled, None, {"w": (4, 3)}),
    "mv": Closed(lambda m, x: torch.mv(m.w, FIXED), scaled, None, {"w": (4, 3)}),
    "mv, as many rows as samples": Closed(
        lambda m, x: torch.mv(m.w, FIXED), scaled, None, {"w": (BATCH, 3)}
    ),
    "mv of a mean of samples": Closed(
        lambda m, x: torch.mv(m.w, x.mean(0)), scaled, None, {"w": (4, WIDTH)}
    ),
    "mv of two parameters": Closed(
        lambda m, x: torch.mv(m.w, m.v), scaled, None, {"w": (4, 3), "v": (3,)}
    ),
    "mv of samples": Closed(lambda m, x: torch.mv(x, m.w), itself, 0, {"w": (WIDTH,)}),
    "addmv": Closed(
        lambda m, x: torch.addmv(m.b, m.w, FIXED), scaled, None, {"w": (4, 3), "b": (4,)}
    ),
    "addmv of samples": Closed(
        lambda m, x: torch.addmv(m.b, x, m.w), itself, 0, {"w": (WIDTH,), "b": (1,)}
    ),
    "addmv of samples, a bias each": Closed(
        lambda m, x: torch.addmv(m.b, x, FIXED[[0, 1, 2, 0]]), itself, None, {"b": (BATCH,)}
    ),
    "linear by a vector": Closed(lambda m, x: F.linear(x, m.w), itself, 0, {"w": (WIDTH,)}),
    "linear by a vector, bias": Closed(
        lambda m, x: F.linear(x[:, None] * FIXED[:2, None], m.w, m.b[0]),
        itself,
        0,
        {"w": (WIDTH,), "b": (1,)},
    ),
    "linear of rows by a vector": Closed(
        lambda m, x: F.linear(m.w, FIXED), scaled, None, {"w": (BATCH, 3)}
    ),
    "linear of expanded rows by a vector": Closed(
        lambda m, x: F.linear(m.q[None].expand(BATCH, -1, -1), FIXED), itself, 0, {"q": (2, 3)}
    ),
    "linear of an expanded query": Closed(
        lambda m, x: F.linear(m.q[None].expand(BATCH, -1, -1), m.w, m.b),
        itself,
        0,
        {"q": (2, WIDTH), "w": (5, WIDTH), "b": (5,)},
    ),
    "linear without bias of an expanded query": Closed(
        lambda m, x: F.linear(m.q[None].expand(BATCH, -1, -1), m.w),
        itself,
        0,
        {"q": (2, WIDTH), "w": (5, WIDTH)},
    ),
    "linear of an expanded query, fixed weight": Closed(
        lambda m, x: F.linear(m.q[None].expand(BATCH, -1, -1), FIXED.view(1, 3)),
        itself,
        0,
        {"q": (2, 3)},
    ),
    "linear of an expanded row": Closed(
        lambda m, x: F.linear(m.q.expand(BATCH, -1), m.w, m.b),
        itself,
        0,
        {"q": (1, WIDTH), "w": (5, WIDTH), "b": (5,)},
    ),
    "matmul of an expanded query": Closed(
        lambda m, x: m.q.expand(BATCH, -1, -1) @ m.w, itself, 0, {"q": (2, WIDTH), "w": (WIDTH, 5)}
    ),
    "matmul of an expanded row": Closed(
        lambda m, x: m.q.expand(BATCH, -1) @ m.w, itself, 0, {"q": (WIDTH,), "w": (WIDTH, 5)}
    ),
    "matmul of a transposed query": Closed(
        lambda m, x: m.q.expand(BATCH, -1, -1).mT @ m.w,
        itself,
        0,
        {"q": (WIDTH, 2), "w": (WIDTH, 5)},
    ),
    "matmul by an expanded matrix": Closed(
        lambda m, x: x[:, None] @ m.w.expand(BATCH, -1, -1), itself, 0, {"w": (WIDTH, 5)}
    ),
    "matmul of a row expanded to positions": Closed(
        lambda m, x: m.q.expand(2, -1) @ m.w,
        lambda sigma, x: x * sigma.sum(0),
        None,
        {"q": (1, 3), "w": (3, WIDTH)},
    ),
    "mv of an expanded row": Closed(
        lambda m, x: torch.mv(m.q.expand(BATCH, -1), m.v), itself, 0, {"q": (1, 3), "v": (3,)}
    ),
    "linear of a copied query": Closed(
        lambda m, x: F.linear(m.q.expand(BATCH, -1, -1).contiguous(), m.w, m.b),
        itself,
        0,
        {"q": (2, WIDTH), "w": (5, WIDTH), "b": (5,)},
    ),
}

"""What both encapsulations see."""

ONE_OP: dict[str, Closed] = {
    "einsum of three": Closed(
        lambda m, x: torch.einsum("bi,ij,bj->b", x, m.w, x), itself, 0, {"w": (WIDTH, WIDTH)}
    ),
    "einsum of three, two weights": Closed(
        lambda m, x: torch.einsum("ij,jk,bk->bi", m.w, m.v, x),
        itself,
        0,
        {"w": (5, 3), "v": (3, WIDTH)},
    ),
    "einsum of an expanded query": Closed(
        lambda m, x: torch.einsum("bqd,de->bqe", m.q.expand(BATCH, -1, -1), m.w),
        itself,
        0,
        {"q": (2, WIDTH), "w": (WIDTH, 5)},
    ),
    "einsum of heads with an expanded query": Closed(
        lambda m, x: torch.einsum("bhqd,hde->bhqe", m.q.expand(BATCH, -1, -1, -1), m.w),
        itself,
        0,
        {"q": (2, 3, WIDTH), "w": (2, WIDTH, 5)},
    ),
}
"""What the ops see as one, and the recorded graph holds as several."""

IN_PAIRS: dict[str, Closed] = {
    "einsum of three": Closed(
        lambda m, x: x @ m.w,
        lambda sigma, x: torch.tanh((sigma * x).sum(1)) * x.sum(1),
        0,
        {"w": (WIDTH, WIDTH)},
    ),
    "einsum of three, two weights": Closed(
        lambda m, x: m.w @ m.v,
        lambda sigma, x: torch.tanh(x @ sigma.t()) * x.sum(1, keepdim=True),
        None,
        {"w": (5, 3), "v": (3, WIDTH)},
    ),
}
"""How the recorded graph holds them, the first two operands first."""


pytestmark = pytest.mark.usefixtures("double_precision")


def by_ops(model: Lambda, x: Tensor) -> list[Tensor]:
    model = copy.deepcopy(model)
    with Attachment(model, Intercept(named_parameters(model), RMS(rho=RHO, eps=EPS))):
        loss_of(model(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


def by_topology(model: Lambda, x: Tensor) -> tuple[Tensor | None, ...]:
    loss, operator = loss_of(model(x)), RMS(rho=RHO, eps=EPS)
    return virtual_grad(loss, list(model.named_parameters()), operator, batch_size=BATCH)


@pytest.mark.parametrize("encapsulation", [by_ops, by_topology], ids=["ops", "topology"])
@pytest.mark.parametrize("name", CLOSED)
def test_virtual_gradient_by_its_definition(name: str, encapsulation: Any) -> None:
    model, x = CLOSED[name].model(), torch.randn(BATCH, WIDTH)
    expected = CLOSED[name].by_definition(model, x)
    for gradient, by_hand in zip(encapsulation(model, x), expected, strict=True):
        torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-13)


def test_linear_by_a_vector_takes_batches_of_any_size() -> None:
    model = Lambda(lambda model, x: F.linear(x, model.w), w=torch.randn(WIDTH))
    operator = RMS(rho=RHO, eps=EPS)
    with Attachment(model, Intercept(named_parameters(model), operator)):
        for batch in (8, 5):
            loss_of(model(torch.randn(batch, WIDTH))).backward()
            operator.commit()
    assert operator.state["(model):linear(w)"]["r"].shape == ()


@pytest.mark.parametrize("name", ONE_OP)
def test_an_einsum_is_one_op_to_the_optimizer(name: str) -> None:
    model, x = ONE_OP[name].model(), torch.randn(BATCH, WIDTH)
    expected = ONE_OP[name].by_definition(model, x)
    for gradient, by_hand in zip(by_ops(model, x), expected, strict=True):
        torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", IN_PAIRS)
def test_an_einsum_is_products_of_pairs_to_the_recorded_graph(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)  # which may order the pairs
    model, x = ONE_OP[name].model(), torch.randn(BATCH, WIDTH)
    expected = IN_PAIRS[name].by_definition(model, x)
    for gradient, by_hand in zip(by_topology(model, x), expected, strict=True):
        torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-13)
