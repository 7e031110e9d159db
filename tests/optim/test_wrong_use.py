"""Wrong use: a typed error with given, allowed, next step; afterwards all works on good input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, VirtualGradientDescent, errors, operators, virtual_grad


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def good_step(model: nn.Module, optimizer: SVGD, size: int = 6) -> None:
    """The optimizer still works on good input."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    model(torch.randn(4, 2, size, size)).square().mean().backward()
    optimizer.step()
    for p, q in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, r"given: lr=-1; allowed: lr \(alpha, the learning rate\) >= 0.*choose lr"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": math.inf}, "lr=inf"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": True}, "lr=True"),
        ({"lr": 0.1, "scale": -0.5}, "scale=-0.5.*s, the scaling coefficient"),
        ({"lr": 0.1, "rho": 1.0}, "rho=1.0.*rho < 1"),
        ({"lr": 0.1, "rho": -0.1}, "rho=-0.1"),
        ({"lr": 0.1, "eps": 0.0}, r"eps=0.0.*eps \(added to r under the root\) > 0"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum=1.0"),
        ({"lr": 0.1, "weight_decay": -1e-4}, "weight_decay=-0.0001"),
        ({"lr": 0.1, "loss_reduction": "none"}, "loss_reduction='none'; allowed: 'mean' or 'sum'"),
        ({"lr": 0.1, "per_sample": "no"}, "per_sample='no'; allowed: True or False"),
        ({"lr": 0.1, "stale": 1}, "stale=1; allowed: True or False"),
        ({"lr": 0.1, "share_positions": None}, "share_positions=None; allowed: True or False"),
        (
            {"lr": 0.1, "nonfinite": "warn"},
            "nonfinite='warn'; allowed: 'raise' or 'skip' or 'ignore'",
        ),
        ({"lr": 0.1, "batch_dim": "a"}, "batch_dim='a'; allowed: an integer >= 0"),
        ({"lr": 0.1, "batch_dim": True}, "batch_dim=True"),
        ({"lr": 0.1, "batch_dim": 1.0}, "batch_dim=1.0"),
        ({"lr": 0.1, "batch_dim": -2}, "batch_dim=-2.*counted from the front"),
    ],
)
def test_hyperparameters_outside_their_range(options: dict, message: str) -> None:
    model = network()
    with pytest.raises(errors.HyperparameterError, match=message) as caught:
        SVGD(model, **options)
    assert isinstance(caught.value, ValueError)
    assert type(model[0]) is nn.Conv2d  # nothing was attached


def test_a_group_outside_its_range_changes_nothing() -> None:
    model = network()
    with pytest.raises(errors.HyperparameterError, match="scale=-1"):
        SVGD(model, 0.1, params=[{"params": model.parameters(), "scale": -1}])
    optimizer = SVGD(model, 0.1, params=[model[0].weight])
    with pytest.raises(errors.HyperparameterError, match="rho=2"):
        optimizer.add_param_group({"params": [model[0].bias], "rho": 2})
    assert len(optimizer.param_groups) == 1


def test_a_tensor_as_learning_rate_is_fine() -> None:
    model = network()
    good_step(model, SVGD(model, torch.tensor(0.1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.ReLU, "ReLU, a model without parameters"),
        (lambda: network().parameters(), "generator in place of the model.*pass the model itself"),
        (lambda: nn.DataParallel(network()), "DataParallel at .*DistributedDataParallel"),
        (lambda: nn.LazyLinear(3), "uninitialized parameter 'weight'.*run one batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_that_cannot_be_optimized(make: object, message: str) -> None:
    with pytest.raises(errors.ModelError, match=message):
        SVGD(make(), 0.1)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_script_modules_hide_their_ops() -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(errors.ModelError, match="ScriptModule hides its ops"):
        SVGD(nn.Sequential(scripted), 0.1)


class NeedsKeyword(nn.Linear):
    """A class that is made with a keyword, as its subclasses have to be."""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()


def test_a_class_that_refuses_subclasses_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(NeedsKeyword(3, 2)))
    message = r"NeedsKeyword at '1\.0'.*\(TypeError: .*'kind'.*__init_subclass__"
    with pytest.raises(errors.ModelError, match=message) as caught:
        SVGD(model, 0.1)
    assert isinstance(caught.value.__cause__, TypeError)
    assert [type(module) for module in model.modules()] == [
        nn.Sequential,
        nn.Linear,
        nn.Sequential,
        NeedsKeyword,
    ]
    model(torch.ones(5, 4)).sum().backward()  # plain, and by nobody's leave
    assert torch.equal(model[1][0].bias.grad, torch.full((2,), 5.0))
    model[1] = nn.Linear(3, 2)
    optimizer = SVGD(model, 0.1)
    model.append(nn.Sequential(nn.Linear(2, 2), NeedsKeyword(2, 2)))
    with pytest.raises(errors.ModelError, match=r"NeedsKeyword at '2\.1'"):
        optimizer.add_param_group({"params": model[2].parameters()})
    assert [type(module) for module in model[2].modules()] == [
        nn.Sequential,
        nn.Linear,
        NeedsKeyword,
    ]
    del model[2]
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    assert sorted(optimizer.operator.state) == ["0:linear(weight)", "1:linear(weight)"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_inputs_without_the_axis_of_the_samples(compiled: bool) -> None:
    """Everything works on good input afterwards, as if it had been the first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    plain = copy.deepcopy(model)
    run = torch.compile(model, backend="eager") if compiled else model
    message = r"batch_dim=2 for Linear, .*shape \(8, 4\).*a tensor with more than 2 axes"
    with SVGD(model, 0.1, batch_dim=2) as optimizer:
        with pytest.raises(errors.HyperparameterError, match=message):
            run(torch.randn(8, 4).double())
        x = torch.randn(5, 2, 8, 4).double()
        run(x).square().mean().backward()
        (weight, bias) = virtual_grad(
            plain(x).square().mean(), plain.parameters(), operators.RMS(), batch_size=8, batch_dim=2
        )
        torch.testing.assert_close(model.weight.grad, weight, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(model.bias.grad, bias, rtol=1e-12, atol=1e-14)
        optimizer.step()


def test_inputs_that_need_no_axis_of_samples() -> None:
    """A number for the whole batch is no batch, and a checkpoint may begin behind a reshape."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            rows = [checkpoint(self.layer, row, use_reentrant=False) for row in x.flatten(0, 1)]
            return torch.stack(rows)

    model = Rows()
    with SVGD(model, 0.1, batch_dim=1):
        model(torch.randn(2, 3, 4).double()).sum().backward()
    scaled = nn.Embedding(5, 3)
    with SVGD(scaled, 0.1):
        scaled(torch.tensor(2)).sum().backward()
    assert scaled.weight.grad is not None


def test_parameters_of_another_model() -> None:
    with pytest.raises(errors.ModelError, match="entry 0 of params="):
        SVGD(network(), 0.1, params=network().parameters())
    with pytest.raises(errors.ModelError, match="empty params="):
        SVGD(network(), 0.1, params=[])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("stale", [False, True])
def test_nonfinite_gradients_raise_and_leave_everything_as_it_was(bad: float, stale: bool) -> None:
    model = network()
    optimizer = SVGD(model, 0.1, stale=stale, momentum=0.9)
    good_step(model, optimizer)
    parameters = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    x = torch.randn(4, 2, 6, 6)
    x[1, 0, 2, 2] = bad
    model(x).square().mean().backward()
    message = r"0:conv2d\(weight\).*lower lr or scale, .*nonfinite='skip'"
    with pytest.raises(errors.NonFiniteError, match=message):
        optimizer.step()
    assert_unchanged(model, optimizer, parameters, state)
    good_step(model, optimizer)


def assert_unchanged(model: nn.Module, optimizer: SVGD, parameters: dict, state: dict) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, parameters[name])
    for index, entries in optimizer.state_dict()["state"].items():
        for name, tensor in entries.items():
            assert torch.equal(tensor, state["state"][index][name])


def test_nonfinite_gradients_can_skip_the_step() -> None:
    model = network()
    optimizer = SVGD(model, 0.1, nonfinite="skip")
    good_step(model, optimizer)
    parameters = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    (model(torch.randn(4, 2, 6, 6)).sum() * math.inf).backward()
    optimizer.step()
    assert_unchanged(model, optimizer, parameters, state)
    good_step(model, optimizer)


def test_nonfinite_gradients_can_be_ignored_without_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with torch.optim.SGD: NaN spreads, and no number is asked for, which a GPU would wait for.

    (The stand-in for that wait is the conversion of a tensor into a number of Python.)
    """

    def refuse(*_: object) -> None:
        raise AssertionError("asked for a number")

    model, x = network(), torch.randn(4, 2, 6, 6)
    optimizer = SVGD(model, 0.1, nonfinite="ignore")
    model(x).square().mean().backward()
    with monkeypatch.context() as patch:
        for method in ("__bool__", "__float__", "__int__", "item", "tolist"):
            patch.setattr(torch.Tensor, method, refuse)
        optimizer.step()
        optimizer.nonfinite = "raise"
        patch.setattr("virtualgrad.optim.descent.step_on_cpu", lambda *_, **__: False)
        with pytest.raises(AssertionError, match="asked for a number"):
            optimizer.step()  # C++ would ask without a conversion
    optimizer.nonfinite = "ignore"
    model(x * float("nan")).square().mean().backward()
    optimizer.step()
    assert any(parameter.isnan().any() for parameter in model.parameters())


def test_a_nonfinite_plain_gradient_is_named_by_its_parameter() -> None:
    model = nn.Linear(3, 2)
    optimizer = VirtualGradientDescent(model, 0.1)
    (model(torch.randn(4, 3)).sum() * math.nan).backward()
    with pytest.raises(errors.NonFiniteError, match="at weight"):
        optimizer.step()


def test_squares_that_overflow_are_found() -> None:
    model = nn.Linear(3, 2)
    optimizer = SVGD(model, 0.1)
    (model(torch.randn(4, 3)).sum() * 1e25).backward()  # g is finite, g^2 is not
    with pytest.raises(errors.NonFiniteError, match="linear"):
        optimizer.step()
    assert model.weight.isfinite().all()


def test_a_changed_input_size_names_the_layer_and_the_way_out() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    good_step(model, optimizer, size=6)
    message = r"0:conv2d\(weight\).*\(3, 5, 5\).*\(3, 4, 4\).*share_positions=True"
    with pytest.raises(errors.ShapeChangedError, match=message):
        model(torch.randn(4, 2, 7, 7)).square().mean().backward()
    good_step(model, optimizer, size=6)
    optimizer.detach()
    shared = SVGD(model, 0.1, share_positions=True)
    for size in (6, 7, 9):
        good_step(model, shared, size=size)
    assert [tuple(s["r"].shape) for s in shared.operator.state.values()] == [(3,)]


def test_a_smaller_last_batch_is_fine() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    for size in (4, 4, 3, 1):
        optimizer.zero_grad()
        model(torch.randn(size, 2, 6, 6)).square().mean().backward()
        optimizer.step()


def test_create_graph_through_a_site() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    loss = model(torch.randn(4, 2, 6, 6)).square().mean()
    with pytest.raises(errors.DoubleBackwardError, match=r"create_graph=True.*optimizer\.detach"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    good_step(model, optimizer)
    linear = nn.Linear(3, 2)
    with SVGD(linear, 0.1), pytest.raises(errors.DoubleBackwardError):
        linear(torch.randn(4, 3)).square().mean().backward(create_graph=True)


def test_torch_func_transforms() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    x = torch.randn(4, 2, 6, 6)
    parameters = dict(model.named_parameters())

    def loss(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    for transformed, argument in (
        (torch.func.grad(loss), x),
        (torch.func.vmap(loss), x.unsqueeze(1)),
    ):
        with pytest.raises(errors.TransformError, match=r"torch.func.*optimizer\.detach\(\)"):
            transformed(argument)
    good_step(model, optimizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"][0]["params"].append(7), r"groups of \[3\].*groups of \[2\]"),
        (lambda s: s["param_groups"][0].pop("scale"), "no 'scale' in param_groups"),
        (lambda s: s.pop("state"), "no 'state' and 'param_groups'"),
        (
            lambda s: s["param_groups"][0].update(param_names=["1.weight", "1.bias"]),
            "a state of parameter '1.weight'; allowed: '0.weight' in its place",
        ),
        (
            lambda s: s["virtualgrad"]["shapes"].update({"0.weight": (5, 2, 3, 3)}),
            r"'0.weight' of shape \(5, 2, 3, 3\); allowed: its shape \(3, 2, 3, 3\)",
        ),
    ],
)
def test_a_state_dict_of_another_model(change: object, message: str) -> None:
    model = network()
    optimizer = SVGD(model, 0.1, momentum=0.9)
    good_step(model, optimizer)
    parameters = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(state)
    change(other)  # type: ignore[operator]
    with pytest.raises(errors.StateDictError, match=message):
        optimizer.load_state_dict(other)
    assert_unchanged(model, optimizer, parameters, state)
    good_step(model, optimizer)


def test_a_state_dict_of_sgd_is_refused() -> None:
    model = network()
    state = torch.optim.SGD(model.parameters(), 0.1).state_dict()
    with pytest.raises(errors.StateDictError, match="no '"):
        SVGD(model, 0.1).load_state_dict(state)


def test_losses_that_lead_nowhere() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with torch.no_grad():
        detached = model(x).sum()
    with pytest.raises(errors.LossError, match=r"does not require grad.*outside torch\.no_grad"):
        virtual_grad(detached, model.parameters(), operators.identity)
    with pytest.raises(errors.LossError, match=r"shape \(4, 2\).*one element"):
        virtual_grad(model(x), model.parameters(), operators.identity)
    unused = nn.Parameter(torch.zeros(1))
    with pytest.raises(errors.LossError, match=r"params\[2\].*allow_unused=True"):
        virtual_grad(model(x).sum(), [*model.parameters(), unused], operators.identity)
    assert (
        virtual_grad(model(x).sum(), [unused, model.bias], operators.identity, allow_unused=True)[0]
        is None
    )
    with pytest.raises(errors.ModelError, match=r"params\[0\], which is a non-leaf tensor"):
        virtual_grad(model(x).sum(), [model.weight * 2], operators.identity)


def test_backward_after_the_optimizer_is_gone() -> None:
    model = nn.Linear(3, 2)
    optimizer = SVGD(model, 0.1)
    loss = F.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 2))
    del optimizer
    with pytest.raises(errors.DetachedError, match="keep the optimizer in a variable"):
        loss.backward()


def test_a_batch_and_a_single_input_before_one_step() -> None:
    """At one site one of them has samples, the other has none: r is of both."""
    model = nn.Linear(3, 2)
    optimizer = SVGD(model, 0.1)
    x = torch.randn(4, 3)
    model(x).sum().backward()
    with pytest.warns(UserWarning, match=r"linear\(weight\) had samples in one pass.*x\[None\]"):
        model(x[0]).sum().backward()
    optimizer.step()
    for inputs in (x[0], x):  # a step for each
        model(inputs).sum().backward()
        optimizer.step()


def test_a_parameter_that_was_put_into_the_list_of_a_group() -> None:
    model = nn.Linear(3, 2)
    optimizer = SVGD(model, 0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    with pytest.raises(errors.ModelError, match=r"3 parameters and 2 names.*add_param_group"):
        optimizer.step()


def test_a_group_without_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = SVGD(model, 0.1)
    del optimizer.param_groups[0]["param_names"]
    with pytest.raises(errors.ModelError, match=r"2 parameters and 0 names"):
        optimizer.zero_grad()
