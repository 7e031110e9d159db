"""A copy of a parameter that was changed in place is no parameter any more: T acts once, or not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Lambda, loss_of
from torch import Tensor, nn

from virtualgrad import virtual_grad
from virtualgrad.operators import Sign
from virtualgrad.virtual import Attachment, Intercept, named_parameters

BATCH, INPUTS, OUTPUTS = 6, 5, 4


pytestmark = pytest.mark.usefixtures("double_precision")


def model_of(forward: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return Lambda(
        forward,
        weight=torch.randn(INPUTS, OUTPUTS),
        gain=torch.randn(OUTPUTS),
    )


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """With T = sign, by the ops."""
    with Attachment(model, Intercept(named_parameters(model), Sign())):
        loss_of(model(x)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_the_graph(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The same by the reference, which walks what torch has recorded."""
    names = [name for name, _ in model.named_parameters()]
    found = virtual_grad(
        loss_of(model(x)), model.named_parameters(), Sign(), batch_size=BATCH, allow_unused=True
    )
    return dict(zip(names, found, strict=True))


def g_of(sigma: Tensor) -> Tensor:
    """The gradient of the loss at the output."""
    output = sigma.detach().requires_grad_()
    (g,) = torch.autograd.grad(loss_of(output), output)
    return g


def in_rows_of_a_view(w: Tensor) -> None:
    w.t()[0].tanh_()


def by_index(w: Tensor) -> None:
    w[torch.tensor([0, 2])] = 1.0


def with_another_function(w: Tensor) -> None:
    F.relu(w[1:3], inplace=True)


def through_a_list(w: Tensor) -> None:
    torch._foreach_exp_([w])


CHANGES = (in_rows_of_a_view, by_index, with_another_function, through_a_list)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.replace("_", " "))
def test_an_overwritten_copy_is_no_parameter(change: Callable[[Tensor], None]) -> None:
    """Whatever has changed it, T does not act where the changed copy is used."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        w = m.weight.clone()
        change(w)
        return x @ w

    model, x = model_of(forward), torch.randn(BATCH, INPUTS)
    expected = by_the_graph(model, x)["weight"]
    torch.testing.assert_close(gradients(model, x)["weight"], expected, rtol=1e-12, atol=0)


def test_a_copy_scaled_by_a_parameter_has_t_once() -> None:
    """w *= gain; x @ w: sigma is w * gain, and T of its g goes on to gain, not T of T."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        w = m.weight.clone()
        w *= m.gain
        return x @ w

    model, x = model_of(forward), torch.randn(BATCH, INPUTS)
    g = x.t() @ g_of(model(x))  # of W * gain
    expected = (g.sign() * model.weight).sum(0)
    torch.testing.assert_close(gradients(model, x)["gain"], expected.detach(), rtol=1e-12, atol=0)


def test_other_copies_stay_the_parameter() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        spoilt, whole = m.weight.clone(), m.weight.clone()
        spoilt[0] = 0.0
        return x @ whole + 0 * spoilt.sum()

    model, x = model_of(forward), torch.randn(BATCH, INPUTS)
    expected = x.t() @ g_of(model(x)).sign()
    torch.testing.assert_close(gradients(model, x)["weight"], expected, rtol=1e-12, atol=0)


def rounded(m: nn.Module, x: Tensor) -> Tensor:
    """A straight-through estimator: the graph has W where the value is another."""
    w = m.weight.clone()
    with torch.no_grad():
        w.copy_(m.weight.round())
    return x @ w


def normalized(m: nn.Module, x: Tensor) -> Tensor:
    """The parameter itself is changed behind the back of a view of it."""
    w = m.weight.view(-1)
    with torch.no_grad():
        m.weight.div_(m.weight.norm())
    return x @ w.view(INPUTS, OUTPUTS)


@pytest.mark.parametrize("forward", [rounded, normalized], ids=["rounded", "normalized"])
def test_a_value_changed_outside_of_the_graph_stays_the_parameter(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    model, x = model_of(forward), torch.randn(BATCH, INPUTS)
    expected = x.t() @ g_of(forward(model, x)).sign()
    torch.testing.assert_close(gradients(model, x)["weight"], expected, rtol=1e-12, atol=0)


def doubled_in_place(m: nn.Module, x: Tensor) -> Tensor:
    w = m.weight.clone()
    w.t()[0].mul_(2)
    return x @ w


def test_a_part_of_a_copy_is_a_parameter_of_its_own() -> None:
    """T acts where a column is doubled; the others reach x @ w in a tensor that is not W's copy."""
    model, x = model_of(doubled_in_place), torch.randn(BATCH, INPUTS)
    expected = x.t() @ g_of(model(x))
    expected[:, 0] = 2 * expected[:, 0].sign()
    torch.testing.assert_close(gradients(model, x)["weight"], expected, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("forward", [doubled_in_place, rounded], ids=["doubled", "rounded"])
def test_compiled_copies_are_overwritten_alike(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    eager, x = model_of(forward), torch.randn(BATCH, INPUTS)
    compiled = copy.deepcopy(eager)
    expected = gradients(eager, x)["weight"]
    torch._dynamo.reset()
    with Attachment(compiled, Intercept(named_parameters(compiled), Sign())):
        run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
        loss_of(run(x)).backward()
    torch.testing.assert_close(compiled.weight.grad, expected, rtol=1e-12, atol=0)


def test_a_parameter_itself_is_overwritten_by_nobody() -> None:
    """Torch's own error, as without an optimizer."""
    model = model_of(lambda m, x: x @ m.weight.mul_(2))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        gradients(model, torch.randn(BATCH, INPUTS))


def test_a_copy_that_is_left_out_passes_t_on() -> None:
    """``where`` leaves the copied parameter out: its plain gradient, and T for the other."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        w = m.weight.clone()
        w *= m.gain
        return x @ w

    model, x = model_of(forward), torch.randn(BATCH, INPUTS)
    g = x.t() @ g_of(model(x))
    intercept = Intercept(
        named_parameters(model), Sign(), where=lambda site: "gain" in site.parameters
    )
    for _ in range(2):  # it is asked in the first pass only
        model.zero_grad()
        with Attachment(model, intercept):
            loss_of(model(x)).backward()
        expected = (g * model.gain).detach(), (g.sign() * model.weight).sum(0).detach()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=0)
