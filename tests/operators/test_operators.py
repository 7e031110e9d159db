"""Operators against their formulas, and the transaction of their state."""

from __future__ import annotations

import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn

from virtualgrad import SVGD, Site, errors, operators
from virtualgrad.operators import (
    RMS,
    Clip,
    Normalize,
    Sign,
    StatefulOperator,
    compose,
    kernels,
    on_sigma,
)
from virtualgrad.sites import read_layout


def site(*shape: int, batch: int | None = 4, axes: frozenset[int] | None = None) -> Site:
    own = frozenset({len(shape) - 1}) if axes is None else axes
    layout = read_layout(shape, own, batch_size=batch)
    return Site("fc:linear(weight)", "linear", ("fc.weight",), ("weight",), True, shape, layout)


@pytest.fixture
def g() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, 5, dtype=torch.float64)


def test_stateless_operators_by_their_formulas(g: Tensor) -> None:
    where = site(4, 3, 5)
    assert operators.identity(g, where) is g
    assert torch.equal(Sign(0.5)(g, where), 0.5 * g.sign())
    assert torch.equal(Clip(0.3)(g, where), g.clamp(-0.3, 0.3))
    lengths = Normalize(2.0)(g, where).flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 2.0))
    whole = Normalize()(g[0], site(3, 5, axes=frozenset({0, 1})))
    torch.testing.assert_close(whole, g[0] / g[0].norm())
    scalars = Normalize()(g[:, 0, 0], site(4, axes=frozenset()))
    torch.testing.assert_close(scalars, g[:, 0, 0].sign())


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
def test_rms_by_its_formula_over_steps(g: Tensor, per_sample: bool, share: bool) -> None:
    operator = RMS(0.5, 0.8, 1e-3, per_sample=per_sample, share_positions=share)
    r = 0.0
    for step in range(3):
        now = g * (step + 1)
        unit = 4 * now if per_sample else now  # m g is the gradient of one sample's loss
        r = 0.8 * r + 0.2 * unit.square().mean((0, 1) if share else 0)
        torch.testing.assert_close(operator(now, site(4, 3, 5)), 0.5 * now / (r + 1e-3).sqrt())
        operator.commit()
        torch.testing.assert_close(operator.state["fc:linear(weight)"]["r"], r)


def test_rms_without_sample_axis_squares_the_sum_over_backward_calls(g: Tensor) -> None:
    operator = RMS(rho=0.5)
    where = site(3, 5, axes=frozenset({0, 1}))
    operator(g[0], where)
    operator(g[1], where)
    operator.commit()
    expected = 0.5 * (g[0] + g[1]).square()
    torch.testing.assert_close(operator.state[where.key]["r"], expected)
    shared = RMS(rho=0.5, share_positions=True)
    positions = site(3, 5, batch=4, axes=frozenset({1}))
    layout = read_layout((3, 5), frozenset({1}), batch_size=4, foldable=False)
    assert layout.sample_axis is None
    shared(g[0], Site(positions.key, "embedding", ("w",), ("weight",), True, (3, 5), layout))
    shared.commit()
    torch.testing.assert_close(shared.state[where.key]["r"], 0.5 * g[0].square().mean(0))


def test_rms_over_micro_batches_gathers_the_r_of_one_large_batch(g: Tensor) -> None:
    whole, parts = RMS(stale=True), RMS(stale=True)
    for _ in range(2):
        whole(g, site(4, 3, 5))
        whole.commit()
        for rows in (slice(0, 1), slice(1, 4)):  # uneven ones
            count = g[rows].shape[0]
            parts(g[rows], site(count, 3, 5, batch=count))
        parts.commit()
    key = "fc:linear(weight)"
    torch.testing.assert_close(whole.state[key]["r"], parts.state[key]["r"])


def test_rms_on_complex_gradients() -> None:
    g = torch.tensor([[3 + 4j], [0 + 0j]])
    out = RMS(rho=0.0, eps=1e-12, per_sample=False)(g, site(2, 1, batch=2))
    torch.testing.assert_close(out, g / (25 / 2) ** 0.5)


def test_rms_on_no_rows_changes_nothing() -> None:
    operator = RMS()
    empty = torch.zeros(0, 5)
    assert operator(empty, site(0, 5)).shape == (0, 5)
    operator.commit()
    assert operator.state == {}


def test_a_transaction_is_committed_or_forgotten(g: Tensor) -> None:
    for operator in (RMS(), on_sigma(operators.adam), compose(Sign(), RMS(stale=True))):
        where = site(4, 3, 5)
        first = operator(g, where)
        operator.rollback()
        assert operator.state in ({}, {where.key: {}})
        assert torch.equal(operator(g, where), first)
        operator.commit()
        assert operator.state[where.key]


def test_first_order_methods_by_torchs_optimizers(g: Tensor) -> None:
    """Where torch's formula is the paper's: SGD, momentum; and RMSProp, Adam up to eps -> 0."""
    references = {
        operators.sgd: lambda p: torch.optim.SGD(p, 1.0),
        operators.momentum: lambda p: torch.optim.SGD(p, 1.0, momentum=0.9),
        operators.rmsprop: lambda p: torch.optim.RMSprop(p, 1.0, alpha=0.9, eps=0),
        operators.adam: lambda p: torch.optim.Adam(p, 1.0, eps=0),
    }
    for method, make in references.items():
        theta = torch.zeros_like(g).requires_grad_()
        optimizer = make([theta])
        state: dict[str, Tensor] = {}
        options = {"delta": 0.0} if method in (operators.rmsprop, operators.adam) else {}
        for step in range(4):
            before = theta.detach().clone()
            theta.grad = g * (1 + step) + step
            optimizer.step()
            p, state = method(theta.grad, state, **options)
            torch.testing.assert_close(theta.detach() - before, p)


def test_delta_stands_inside_the_root(g: Tensor) -> None:
    p, _ = operators.rmsprop(g, {}, rho=0.9, delta=0.25)
    torch.testing.assert_close(p, -g / torch.sqrt(0.25 + 0.1 * g * g))
    p, _ = operators.adam(g, {}, delta=0.25)
    torch.testing.assert_close(p, -g / torch.sqrt(0.25 + g * g))


def test_first_order_on_sigma_refuses_another_batch_size(g: Tensor) -> None:
    operator = on_sigma(operators.momentum, c=0.5)
    torch.testing.assert_close(operator(g, site(4, 3, 5)), g)
    operator.commit()
    torch.testing.assert_close(operator(g, site(4, 3, 5)), 1.5 * g)
    with pytest.raises(errors.ShapeChangedError, match=r"\(2, 3, 5\).*\(4, 3, 5\).*batch size"):
        operator(g[:2], site(2, 3, 5, batch=2))


def test_compose_applies_the_rightmost_first(g: Tensor) -> None:
    where = site(4, 3, 5)
    double = lambda g, site: 2 * g  # noqa: E731
    assert torch.equal(compose(Clip(0.1), double)(g, where), (2 * g).clamp(-0.1, 0.1))
    assert torch.equal(compose(double, Clip(0.1))(g, where), 2 * g.clamp(-0.1, 0.1))
    nested = compose(Sign(), compose(double, RMS()))
    assert isinstance(nested, StatefulOperator)
    nested(g * float("inf"), where)
    assert nested.nonfinite_sites() == [where.key]


class Row(nn.Module):
    """A product with a vector: sigma is a number for each sample, and r a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.row


@pytest.mark.parametrize("device", DEVICES)
def test_a_single_r_is_not_rounded_to_half_precision(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its factor, 1 / sqrt(0 + eps), is a million, which float16 does not hold."""
    monkeypatch.setattr(kernels, "may_launch", lambda device: False)
    model = Row().half().to(device)
    tiny = 2.0**-20
    with SVGD(model, 1.0, stale=True, per_sample=False, eps=1e-12):
        (model(torch.ones(4, 3, device=device).half()) * tiny).sum().backward()
    assert model.row.grad is not None
    torch.testing.assert_close(
        model.row.grad.cpu().float(), torch.full((3,), 4e6 * tiny), rtol=1e-3, atol=0
    )
