"""The two encapsulations agree to float64 precision on every supported layer and pattern."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from cases import CASES, Case, loss_of
from torch import Tensor, nn

from virtualgrad import operators, virtual_grad
from virtualgrad.lab.networks import MLP, VGG, ResNet20
from virtualgrad.operators import RMS, Operator, Sign, StatefulOperator
from virtualgrad.virtual import Attachment, Intercept, named_parameters

OPERATORS: dict[str, Callable[[], Operator]] = {
    "identity": lambda: operators.identity,
    "sign": Sign,
    "rms": RMS,
    "rms, stale": lambda: RMS(stale=True),
    "rms, batch": lambda: RMS(per_sample=False, scale=0.1),
    "rms, shared": lambda: RMS(share_positions=True),
    "momentum on sigma": lambda: operators.on_sigma(operators.momentum, c=0.5),
    "composed": lambda: operators.compose(operators.Clip(0.1), operators.RMS(stale=True)),
}


pytestmark = pytest.mark.usefixtures("double_precision")


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def assert_agree(case: Case, make_operator: Callable[[], Operator], steps: int = 3) -> None:
    """Run both encapsulations side by side for a few steps, and compare all gradients."""
    by_ops = case.model()
    by_topology = copy.deepcopy(by_ops)
    first, second = make_operator(), make_operator()
    intercept = Intercept(named_parameters(by_ops), first, batch_dim=case.batch_dim)
    with Attachment(by_ops, intercept):
        for _ in range(steps):
            inputs = case.inputs()
            by_ops.zero_grad()
            output = by_ops(*inputs)
            loss_of(output).backward()
            if isinstance(first, StatefulOperator):
                first.commit()
            reference = by_topology(*inputs)
            assert torch.equal(output, reference)  # attaching changes no bit of the output
            expected = virtual_grad(
                loss_of(reference),
                trainable(by_topology),
                second,
                batch_size=case.batch_size,
                batch_dim=case.batch_dim,
            )
            # A bias before a batch norm has a gradient of zero, and what is left is rounding.
            rounding = 1e-14 * sum(gradient.norm() for gradient in expected)
            for (name, parameter), gradient in zip(trainable(by_ops), expected, strict=True):
                error = (parameter.grad - gradient).norm()
                assert error < 1e-10 * gradient.norm() + rounding, (name, error)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", CASES)
def test_encapsulations_agree(case: str, operator: str) -> None:
    assert_agree(CASES[case], OPERATORS[operator])


@pytest.mark.parametrize("operator", ["identity", "rms", "rms, stale", "rms, shared"])
@pytest.mark.parametrize(
    ("network", "shape"), [(MLP, (784,)), (VGG, (3, 32, 32)), (ResNet20, (3, 32, 32))]
)
def test_encapsulations_agree_on_the_networks_of_the_paper(
    network: type[nn.Module], shape: tuple[int, ...], operator: str
) -> None:
    case = Case(network, lambda: (torch.randn(4, *shape),), batch_size=4)
    assert_agree(case, OPERATORS[operator], steps=2)


@pytest.mark.parametrize("case", CASES)
def test_identity_gives_the_gradient_of_autograd(case: str) -> None:
    model = CASES[case].model()
    plain = copy.deepcopy(model)
    inputs = CASES[case].inputs()
    with Attachment(model, Intercept(named_parameters(model), operators.identity)):
        loss_of(model(*inputs)).backward()
    loss_of(plain(*inputs)).backward()
    by_topology = virtual_grad(loss_of(plain(*inputs)), trainable(plain), operators.identity)
    for (name, p), (_, q), v in zip(trainable(model), trainable(plain), by_topology, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14, msg=name)
        torch.testing.assert_close(v, q.grad, rtol=1e-12, atol=1e-14, msg=name)


WITH_FLOAT_INPUTS = [name for name, case in CASES.items() if case.inputs()[0].is_floating_point()]


@pytest.mark.parametrize("case", WITH_FLOAT_INPUTS)
def test_activations_keep_the_true_gradient(case: str) -> None:
    model, inputs = CASES[case].model(), CASES[case].inputs()
    gradients = []
    for attach in (False, True):
        x = inputs[0].clone().requires_grad_()
        if attach:
            Attachment(model, Intercept(named_parameters(model), Sign()))
        loss_of(model(x, *inputs[1:])).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
