"""What ops on raw parameters are to T: einsum is one op, and some linear ops are not known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Lambda, loss_of
from torch import Tensor, nn

from virtualgrad import every_linear_site, explain, virtual_grad, weights_only
from virtualgrad.operators import Sign
from virtualgrad.sites import Where
from virtualgrad.virtual import Attachment, Intercept, named_parameters

BATCH, WIDTH = 6, 4


pytestmark = pytest.mark.usefixtures("double_precision")


def with_sign(
    model: nn.Module, x: Tensor, where: Where = every_linear_site
) -> dict[str, Tensor | None]:
    with Attachment(model, Intercept(named_parameters(model), Sign(), where=where)):
        loss_of(model(x)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_at(sigma: Tensor) -> Tensor:
    output = sigma.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(output), output)
    return g


def test_einsum_of_two_is_a_product() -> None:
    model = Lambda(lambda m, x: torch.einsum("bi,ij->bj", x, m.w), w=torch.randn(WIDTH, 3))
    x = torch.randn(BATCH, WIDTH)
    expected = x.t() @ gradient_at(model(x)).sign()
    (by_graph,) = virtual_grad(loss_of(model(x)), model.parameters(), Sign(), batch_size=BATCH)
    torch.testing.assert_close(with_sign(model, x)["w"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(by_graph, expected, rtol=1e-12, atol=0)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=1),
    "tensordot, axes": lambda x, w: torch.tensordot(w, x, dims=([0], [1])).t(),
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, w),
    "dot": lambda x, w: torch.stack([torch.dot(x.flatten()[:3], each) for each in w]),
    "matmul of vectors": lambda x, w: torch.stack([x.flatten()[:3] @ each for each in w]),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_has_a_weight_whatever_it_is_called(product: str) -> None:
    """To ``weights_only``, which SVGD.released asks, in both encapsulations."""
    model = Lambda(lambda m, x: PRODUCTS[product](x, m.w), w=torch.randn(WIDTH, 3))
    x = torch.randn(BATCH, WIDTH)
    plain = torch.autograd.grad(loss_of(model(x)), model.w)[0]
    (by_graph,) = virtual_grad(
        loss_of(model(x)), model.parameters(), Sign(), where=weights_only, batch_size=BATCH
    )
    by_ops = with_sign(model, x, weights_only)["w"]
    torch.testing.assert_close(by_ops, by_graph, rtol=1e-12, atol=0)
    assert not torch.allclose(by_graph, plain)


def test_einsum_of_three_is_one_op_to_the_optimizer() -> None:
    """sigma is its output, for both factors; the graph has two products, x W and (x W) V."""
    model = Lambda(
        lambda m, x: torch.einsum("bi,ij,jk->bk", x, m.w, m.v),
        w=torch.randn(WIDTH, 3),
        v=torch.randn(3, 2),
    )
    x = torch.randn(BATCH, WIDTH)
    w, v = model.w.detach(), model.v.detach()
    g = gradient_at(model(x))
    by_graph = virtual_grad(loss_of(model(x)), model.parameters(), Sign(), batch_size=BATCH)
    by_ops = with_sign(model, x)
    torch.testing.assert_close(by_ops["w"], x.t() @ g.sign() @ v.t(), rtol=1e-12, atol=0)
    torch.testing.assert_close(by_ops["v"], (x @ w).t() @ g.sign(), rtol=1e-12, atol=0)
    torch.testing.assert_close(by_graph[0], x.t() @ (g @ v.t()).sign(), rtol=1e-12, atol=0)
    torch.testing.assert_close(by_graph[1], (x @ w).t() @ g.sign(), rtol=1e-12, atol=0)


NOT_KNOWN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "hstack": lambda m, x: x * torch.hstack([m.b[:2], m.b[2:]]),
    "inner": lambda m, x: torch.inner(x, m.b),
    "outer": lambda m, x: torch.outer(x[:, 0], m.b),
    "kron": lambda m, x: torch.kron(x, m.b[None]),
    "tile": lambda m, x: x * torch.tile(m.b, (BATCH, 1)),
    "vecdot": lambda m, x: torch.linalg.vecdot(x, m.b),
    "repeat_interleave": lambda m, x: x[:, :1] * m.b.repeat_interleave(2),
}


@pytest.mark.parametrize("op", NOT_KNOWN)
def test_linear_ops_that_are_not_known_have_the_plain_gradient(op: str) -> None:
    model, x = Lambda(NOT_KNOWN[op], b=torch.randn(WIDTH)), torch.randn(BATCH, WIDTH)
    (plain,) = torch.autograd.grad(loss_of(model(x)), [model.b])
    assert torch.equal(with_sign(model, x)["b"], plain)
    assert "b" in str(explain(model, x).uncovered)


class KeptView(nn.Module):
    """A layer with a view of its weight that was made once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.transposed = self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed


def test_a_view_made_before_the_pass_has_the_plain_gradient() -> None:
    model, x = KeptView(), torch.randn(BATCH, WIDTH)
    (plain,) = torch.autograd.grad(loss_of(model(x)), [model.weight])
    assert torch.equal(with_sign(model, x)["weight"], plain)
