"""Ways of use that a review found to go wrong: each is a case here now."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from virtualgrad import SVGD, VirtualGradientDescent, errors, operators, virtual_grad


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("layer", [nn.Linear, lambda i, o, **k: nn.Conv1d(i, o, 1, **k)])
def test_complex_parameters_have_autograds_gradient(layer: object) -> None:
    model = layer(3, 2, dtype=torch.complex128)  # type: ignore[operator]
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3, 1, dtype=torch.complex128)
    x = x if isinstance(model, nn.Conv1d) else x[..., 0]
    optimizer = VirtualGradientDescent(model, 0.1)
    for m in (model, plain):
        m(x).abs().square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    optimizer.step()


def test_gradients_of_the_input_do_not_run_t() -> None:
    """Saliency maps and adversarial examples between zero_grad and backward."""
    model, reference = network(), network()
    optimizer, undisturbed = SVGD(model, 0.1), SVGD(reference, 0.1)
    for _ in range(2):
        x = torch.randn(6, 4, requires_grad=True)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(inputs=[x], retain_graph=True)
        loss.backward()
        optimizer.step()
        step(reference, undisturbed, x)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradients_of_a_parameter_by_autograd_grad_are_virtual() -> None:
    asked, trained, x = network(), network(), torch.randn(6, 4)
    with SVGD(asked, 0.1), SVGD(trained, 0.1):
        (grad,) = torch.autograd.grad(asked(x).square().mean(), [asked[0].weight])
        trained(x).square().mean().backward()
    assert torch.equal(grad, trained[0].weight.grad)
    plain = network()
    plain(x).square().mean().backward()
    assert not torch.allclose(grad, plain[0].weight.grad)


def test_time_first_inside_a_batch_first_model() -> None:
    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    torch.manual_seed(0)
    swapped, straight = Swapped(), nn.Linear(3, 2)
    straight.load_state_dict(swapped.layer.state_dict())
    optimizers = [SVGD(swapped, 0.1), SVGD(straight, 0.1)]
    for size in (4, 4, 3):
        x = torch.randn(size, 7, 3)
        step(swapped, optimizers[0], x)
        step(straight, optimizers[1], x)
    torch.testing.assert_close(swapped.layer.weight, straight.weight)
    assert [tuple(s["r"].shape) for s in optimizers[0].operator.state.values()] == [(7, 2)]


def test_a_nan_that_a_penalty_brings_is_found() -> None:
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    optimizer = SVGD(model, 0.1)
    (model(torch.randn(4, 3)).sum() + model.weight.square().sum().sqrt()).backward()
    with pytest.raises(errors.NonFiniteError, match="at weight"):
        optimizer.step()
    assert model.weight.isfinite().all()


def test_r_outlasts_a_bias_that_thaws_or_comes_later() -> None:
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = SVGD(model, 0.1)
    step(model, optimizer, torch.randn(6, 4))
    model.bias.requires_grad_(True)
    step(model, optimizer, torch.randn(6, 4))
    assert list(optimizer.operator.state) == ["(model):linear(weight)"]
    served = optimizer._attachment.intercept.parameters_at
    assert served == {"(model):linear(weight)": ("weight", "bias")}
    later = nn.Linear(4, 3)
    optimizer = SVGD(later, 0.1, params=[later.weight])
    step(later, optimizer, torch.randn(6, 4))
    optimizer.add_param_group({"params": [later.bias]})
    step(later, optimizer, torch.randn(6, 4))
    assert set(optimizer.operator.state) == {
        "(model):linear(weight)",
        "(model):linear(weight)[bias]",
    }


def test_r_outlasts_a_weight_that_thaws_and_a_choice_of_biases() -> None:
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    optimizer = SVGD(model, 0.1)
    step(model, optimizer, torch.randn(6, 4))
    model.weight.requires_grad_(True)
    step(model, optimizer, torch.randn(6, 4))
    assert list(optimizer.operator.state) == ["(model):linear(weight)"]
    other = nn.Linear(4, 3)
    biases = SVGD(other, 0.1, where=lambda site: site.roles == ("bias",))
    for _ in range(3):
        step(other, biases, torch.randn(6, 4))
    assert list(biases.operator.state) == ["(model):linear(weight)"]


def test_a_validation_loss_with_a_graph_does_not_shift_the_sites() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    kept = []
    for _ in range(3):
        model.train()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        kept.append(model(torch.randn(6, 4)).square().mean())
    assert not any("#" in key for key in optimizer.operator.state)


def test_a_forward_that_fails_does_not_shift_the_sites() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    step(model, optimizer, torch.randn(6, 4))
    model.append(nn.Linear(7, 7))
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(6, 4))
    assert caught.value is not None  # its frames keep the half-made graph alive
    del model[3]
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    assert not any("#" in key for key in optimizer.operator.state)


def test_picked_rows_keep_the_layout_that_they_began_with() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, rows: int) -> Tensor:
            return self.layer(x.reshape(-1, 3)[:rows])

    model = Expert()
    optimizer = SVGD(model, 0.1)
    for rows in (5, 7, 8, 0, 1):
        optimizer.zero_grad()
        model(torch.randn(4, 2, 3), rows).square().sum().backward()
        optimizer.step()
    assert [tuple(s["r"].shape) for s in optimizer.operator.state.values()] == [(2,)]


def test_a_value_for_the_whole_batch_may_come_first() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return self.layer(x) * t

    model = Timed()
    optimizer = SVGD(model, 0.1)
    model(torch.ones(1), torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    assert [tuple(s["r"].shape) for s in optimizer.operator.state.values()] == [(2,)]


def test_gradients_cleared_behind_the_optimizers_back_leave_no_statistic() -> None:
    model, reference = network(), network()
    optimizer, undisturbed = SVGD(model, 0.1), SVGD(reference, 0.1)
    (1000 * model(torch.randn(6, 4)).square().mean()).backward()
    model.zero_grad()  # a batch that was given up
    x = torch.randn(6, 4)
    model(x).square().mean().backward()
    optimizer.step()
    step(reference, undisturbed, x)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_virtual_grad_refuses_a_graph_with_a_t_in_it_already() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    with pytest.raises(errors.ModelError, match=r"optimizer attached.*detach\(\)"):
        virtual_grad(model(torch.randn(6, 4)).sum(), model.parameters(), operators.Sign())
    assert optimizer.operator.state == {}


def test_virtual_grad_does_not_commit_nan() -> None:
    model, rms = network(), operators.RMS()
    with pytest.raises(errors.NonFiniteError, match="addmm"):
        virtual_grad(model(torch.randn(6, 4)).sum() * float("nan"), model.parameters(), rms)
    assert rms.state == {}
    with pytest.raises(errors.ModelError, match="no parameters"):
        virtual_grad(model(torch.randn(6, 4)).sum(), [], rms)


def test_a_frozen_weight_does_not_hold_on_to_its_input() -> None:
    model = nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    with SVGD(model, 0.1):
        x = torch.randn(6, 4, requires_grad=True) * 1
        y = model(x)
        x.add_(1)  # in place: plain autograd does not need the old value either
        y.sum().backward()
    assert model.bias.grad is not None


def test_a_vector_as_weight_of_a_linear_function() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.w)

    model = Vector()
    optimizer = SVGD(model, 0.1)
    step(model, optimizer, torch.randn(5, 3))


def test_an_empty_batch_beside_a_constant() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("table", torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.table).sum() + self.layer(x).sum()

    model = Constant()
    optimizer = SVGD(model, 0.1)
    model(torch.zeros(0, 3)).backward()
    optimizer.step()
    assert model.layer.weight.isfinite().all()


def test_state_can_be_saved_after_detaching() -> None:
    model = network()
    with SVGD(model, 0.1) as optimizer:
        step(model, optimizer, torch.randn(6, 4))
    saved = optimizer.state_dict()
    kept = [entry for entries in saved["state"].values() for entry in entries]
    assert sum(entry.startswith("r@") for entry in kept) == 2
    copied = copy.deepcopy(optimizer)
    copied.zero_grad()
    assert copied.state_dict()["param_groups"]


def test_two_models_that_share_a_parameter_share_its_optimizer() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with SVGD(first, 0.1), pytest.raises(errors.ClaimedParameterError, match="'weight'"):
        SVGD(second, 0.1)
    SVGD(second, 0.1).detach()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: SVGD(m, 0.1, where="weights"), errors.HyperparameterError, "where='weights'"),
        (
            lambda m: SVGD(m, 0.1, params=[{"lr": 1.0}]),
            errors.ModelError,
            r"a parameter group with \['lr'\] only",
        ),
    ],
)
def test_more_wrong_use(change: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        change(network())  # type: ignore[operator]


def test_a_state_of_a_parameter_that_is_not_there() -> None:
    model = network()
    optimizer = SVGD(model, torch.tensor([0.1]))
    assert "lr=0.1" in repr(optimizer)
    state = optimizer.state_dict()
    state["state"][9] = {"momentum_buffer": torch.zeros(1)}
    with pytest.raises(errors.StateDictError, match="parameter number 9"):
        optimizer.load_state_dict(state)
