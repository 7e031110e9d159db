"""Values that are made of parameters alone, as in relative attention: they have no samples.

Found in DeBERTa-v2, whose table of relative positions goes through the layers of every block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD, operators, virtual_grad

BATCH, LENGTH, WIDTH = 6, 5, 4


class Positions(nn.Module):
    """x + table * gain, the table with or without a leading axis of size one."""

    def __init__(self, leading: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = torch.randn(LENGTH, WIDTH).double()
        self.table = nn.Parameter(table[None] if leading else table)
        self.gain = nn.Parameter(torch.randn(WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.table * self.gain)


class Projected(nn.Module):
    """x plus a layer's value of a table: the table is the input of a linear function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH).double())
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.layer(self.table))


def test_a_leading_axis_of_size_one_makes_no_difference() -> None:
    plain, leading = Positions(leading=False), Positions(leading=True)
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    for model in (plain, leading):
        optimizer = SVGD(model, 0.1)
        model(x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(leading.gain.grad, plain.gain.grad, rtol=1e-10, atol=0)
    torch.testing.assert_close(leading.table[0], plain.table, rtol=1e-10, atol=0)


def test_r_of_such_a_value_is_of_the_whole_gradient() -> None:
    """By the definition: g is that of the whole loss already, so r follows g^2 as it is."""
    model = Positions(leading=False)
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    sigma = (model.table * model.gain).detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(x + sigma).square().mean(), sigma)
    optimizer = SVGD(model, 0.1)
    model(x).square().mean().backward()
    optimizer.step()
    (state,) = optimizer.operator.state.values()
    torch.testing.assert_close(state["r"], 0.1 * g.square(), rtol=1e-10, atol=0)


def test_a_parameter_as_the_input_of_a_layer() -> None:
    model, plain = Projected(), Projected()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    expected = virtual_grad(
        plain(x).square().mean(),
        plain.named_parameters(),
        operators.RMS(),
        batch_size=BATCH,
    )
    with SVGD(model, 0.1):
        model(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=0)


def test_the_same_written_as_a_product() -> None:
    """By ``@``, two ops in place of one."""

    class ByProduct(Projected):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + (self.table @ self.layer.weight.t() + self.layer.bias))

    model, plain = ByProduct(), ByProduct()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    expected = virtual_grad(
        plain(x).square().mean(), plain.named_parameters(), operators.RMS(), batch_size=BATCH
    )
    with SVGD(model, 0.1):
        model(x).square().mean().backward()
    untouched = ByProduct()
    F.mse_loss(untouched(x), torch.zeros_like(x)).backward()
    for name, gradient in zip(dict(model.named_parameters()), expected, strict=True):
        found = model.get_parameter(name).grad
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=0)
        assert not torch.allclose(found, untouched.get_parameter(name).grad)
