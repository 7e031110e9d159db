"""Wrong operators: a typed error that names the site, or the operator; nothing is claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from virtualgrad import SVGD, VirtualGradientDescent, errors, operators, virtual_grad


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (
            lambda g, site: g.sum(),
            r"<lambda> returned \(\) float32 on cpu at {}; allowed: .*\(4, 2\)",
        ),
        (lambda g, site: g.double(), r"returned \(4, 2\) float64 on cpu at {}; allowed: .*float32"),
        (lambda g, site: 3.0, "returned float at {}"),
    ],
)
def test_an_operator_that_does_not_fit_is_named_with_its_site(
    operator: object, message: str
) -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with (
        VirtualGradientDescent(model, 0.1, operator),  # type: ignore[arg-type]
        pytest.raises(errors.OperatorError, match=message.format(r"\(model\):linear\(weight\)")),
    ):
        model(x).sum().backward()
    with pytest.raises(errors.OperatorError, match=message.format(r"addmm\(bias, weight\)")):
        virtual_grad(model(x).sum(), model.named_parameters(), operator)  # type: ignore[arg-type]


def test_an_operator_that_cannot_be_called() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(errors.OperatorError, match="operator=3; allowed: a callable"):
        VirtualGradientDescent(model, 0.1, operator=3)  # type: ignore[arg-type]
    assert type(model) is nn.Linear
    with pytest.raises(errors.OperatorError, match=r"RMS.*pass RMS\(\)"):
        VirtualGradientDescent(model, 0.1, operators.RMS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrap",
    [lambda rms: rms, lambda rms: operators.compose(operators.Clip(1.0), rms)],
    ids=["alone", "in a composition"],
)
def test_one_operator_with_a_state_serves_one_optimizer(wrap: Callable[..., Any]) -> None:
    """Their sites have the same names, so the states would mix."""
    rms = operators.RMS()
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = VirtualGradientDescent(first, 0.1, wrap(rms))
    with pytest.raises(errors.OperatorError, match=r"RMS.*another optimizer.*one for each"):
        VirtualGradientDescent(second, 0.1, wrap(rms))
    assert type(second) is nn.Linear
    SVGD(second, 0.1).detach()  # nothing is claimed
    optimizer.detach()
    other = VirtualGradientDescent(second, 0.1, wrap(rms))
    torch.optim.lr_scheduler.StepLR(other, 1)  # makes a reference cycle
    del other
    VirtualGradientDescent(first, 0.1, wrap(rms)).detach()


def test_operators_without_a_state_may_be_shared() -> None:
    sign = operators.Sign()
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [VirtualGradientDescent(model, 0.1, sign) for model in (first, second)]
    assert len(optimizers) == 2


def test_hyperparameters_of_operators() -> None:
    with pytest.raises(errors.HyperparameterError, match="limit=0"):
        operators.Clip(0)
    with pytest.raises(errors.OperatorError, match="no operators"):
        operators.compose()
