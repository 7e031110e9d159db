"""A plan is remembered for a site, and serves no other one, however alike the calls are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.errors import ShapeChangedError
from virtualgrad.operators import Sign
from virtualgrad.virtual import Attachment, Intercept, named_parameters

FEATURES = 4


pytestmark = pytest.mark.usefixtures("double_precision")


class Tasks(nn.Module):
    """A parameter that all tasks share, and one of each task's own, in one op."""

    def __init__(self, op: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.op = op
        self.shared = nn.Parameter(torch.randn(shape))
        self.own = nn.ParameterList([nn.Parameter(torch.randn(FEATURES)) for _ in range(2)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.op(x, self.shared, self.own[task])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (FEATURES,), weight, bias)


TASKS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "linear": (F.linear, (FEATURES, FEATURES)),
    "layer norm": (layer_norm, (FEATURES,)),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "shared one frozen"])
@pytest.mark.parametrize("name", TASKS)
def test_a_parameter_in_anothers_place_has_its_own_gradient(name: str, frozen: bool) -> None:
    """Two tasks in turn: the sums of sign(g) for each bias, not those of the first or none."""
    op, shape = TASKS[name]
    model = Tasks(op, *shape)
    model.shared.requires_grad_(not frozen)
    Attachment(model, Intercept(named_parameters(model), Sign()))
    for task in (0, 1, 0, 1):
        x = torch.randn(6, FEATURES)
        model.zero_grad()
        sigma = model(x, task)
        sigma.pow(3).sum().backward()
        expected = (3 * sigma.detach() ** 2).sign().sum(0)
        assert torch.equal(model.own[task].grad, expected)
        assert model.own[1 - task].grad is None


def test_a_sum_of_parameters_has_the_gradient_of_each() -> None:
    """Sigma is shared + own, as large as one of them: both get sign(dJ/dsigma)."""
    model = Tasks(lambda x, shared, own: x * (shared + own), FEATURES)
    Attachment(model, Intercept(named_parameters(model), Sign()))
    for task in (0, 1):
        x = torch.randn(6, FEATURES)
        model.zero_grad()
        model(x, task).pow(3).sum().backward()
        sigma = (model.shared + model.own[task]).detach()
        expected = (3 * x**3 * sigma**2).sum(0).sign()
        assert torch.equal(model.own[task].grad, expected)
        assert torch.equal(model.shared.grad, expected)


class Turned(nn.Module):
    """Samples along the first or along the last axis of a square sigma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor, how: str) -> Tensor:
        return torch.einsum(how, x, self.weight)


class Picked(nn.Module):
    """Rows of a table by their numbers: a tensor of them, or a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 3))

    def forward(self, x: Tensor, how: Tensor | list[int]) -> Tensor:
        return x * self.weight[how]


def test_another_layout_is_read_anew() -> None:
    """As by an optimizer that has the same state, and has seen nothing of the other layout."""
    model, fresh = Turned(), Turned()
    fresh.load_state_dict(model.state_dict())
    optimizer, other = (SVGD(each, 0.0, scale=0.3) for each in (model, fresh))
    x, z = torch.randn(2, FEATURES, FEATURES)
    model(x, "bi,ij->bj").pow(3).sum(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    other.load_state_dict(optimizer.state_dict())
    for each in (model, fresh):
        each(z, "bi,ij->jb").pow(3).sum(-1).mean().backward()
    assert torch.equal(model.weight.grad, fresh.weight.grad)


def test_another_layout_that_needs_another_r_is_refused() -> None:
    model = Picked()
    optimizer = SVGD(model, 0.0)
    x = torch.randn(3, 3)
    model(x, torch.tensor([0, 2, 1])).sum().backward()
    optimizer.step()
    with pytest.raises(ShapeChangedError, match=r"index\(weight\)"):
        model(x, [0, 2, 1]).sum().backward()
