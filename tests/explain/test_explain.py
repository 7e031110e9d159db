"""What explain() finds, against the paper's numbers and against what SVGD itself does."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import virtualgrad
from virtualgrad.errors import ModelError
from virtualgrad.explain import Explanation, explain
from virtualgrad.lab.networks import MLP, VGG, ResNet20

PAPER = {
    "mlp": (MLP, (8, 1, 28, 28)),
    "vgg": (VGG, (2, 3, 32, 32)),
    "resnet": (ResNet20, (2, 3, 32, 32)),
}
every_network = pytest.mark.parametrize(("network", "shape"), PAPER.values(), ids=list(PAPER))


class Net(nn.Module):
    """Parameters a, b, ... of given shapes, and a forward."""

    def __init__(self, forward, **shapes):
        super().__init__()
        self.function = forward
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape) + 0.5))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Scale(torch.autograd.Function):
    """Linear, but nobody can know."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.save_for_backward(x, a)
        return x * a

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        return g * a, (g * x).sum(0)


def explain_net(forward, *inputs, **shapes) -> Explanation:
    return explain(Net(forward, **shapes), *(inputs or (torch.randn(4, 3),)))


# -------------------------------------------------------------------- the paper's numbers


@pytest.mark.parametrize(("name", "numbers"), [("mlp", 490), ("resnet", 188_426)])
def test_state_of_the_released_code_has_the_papers_size(name, numbers):
    network, shape = PAPER[name]
    found = explain(network(), torch.randn(shape), where=virtualgrad.weights_only)
    assert found.state_elements == numbers


def test_totals_of_resnet20():
    found = explain(ResNet20(), torch.randn(2, 3, 32, 32))
    assert found.parameter_elements == found.rmsprop_elements == 269_722
    assert found.adam_elements == 539_444


@every_network
def test_every_parameter_is_accounted_for_once(network, shape):
    model = network()
    names = [name for name, _ in model.named_parameters()]
    for where in (None, virtualgrad.weights_only):
        found = explain(model, torch.randn(shape), where=where)
        covered = [name for site in found.transformed for name in site.parameters]
        assert list(found.parameters) == names
        assert sorted([*covered, *found.uncovered]) == sorted(names)
        assert all(len(keys) == 1 for keys in found.parameters.values())
        assert found.linear_sites == found.sites


@every_network
@pytest.mark.parametrize("share_positions", [False, True])
def test_keys_and_sizes_are_those_of_svgd_after_a_step(network, shape, share_positions):
    model, images = network(), torch.randn(shape)
    found = explain(model, images, share_positions=share_positions)
    optimizer = virtualgrad.SVGD(model, lr=0.1, share_positions=share_positions)
    model(images).sum().backward()
    optimizer.step()
    state = {key: tensors["r"].numel() for key, tensors in optimizer.operator.state.items()}
    assert {s.key: s.state_elements(share_positions) for s in found.transformed} == state
    assert found.state_elements == sum(state.values())


def test_shared_positions_leave_one_number_per_channel():
    found = explain(nn.Conv2d(3, 5, 3), torch.randn(2, 3, 8, 8), share_positions=True)
    assert found.state_elements == 5
    assert "averaged over positions" in str(found)


# -------------------------------------------------------------------- sites


def test_a_layer_called_twice_has_two_sites():
    found = explain_net(lambda net, x: F.linear(F.linear(x, net.a), net.a), a=(3, 3))
    assert found.parameters == {"a": ["(model):linear(a)", "(model):linear(a)#1"]}
    assert len(found.transformed) == 2


def test_a_tied_weight_has_a_site_per_use_under_its_first_name():
    model = nn.Module()
    model.encode, model.decode = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    model.decode.weight = model.encode.weight
    model = nn.Sequential(model.encode, model.decode)
    found = explain(model, torch.randint(7, (4, 2)))
    assert found.parameters == {"0.weight": ["0:embedding(weight)", "1:linear(0.weight)"]}


def test_sites_nested_in_modules_are_named_by_their_path():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 2))), nn.Linear(2, 1))
    found = explain(model, torch.randn(4, 3))
    assert [site.key for site in found.sites] == [
        "0.0.0:linear(weight)",
        "1:linear(weight)",
    ]


def test_a_cell_is_shown_site_by_site():
    found = explain(nn.LSTMCell(3, 5), torch.randn(4, 3))
    assert [site.parameters for site in found.transformed] == [
        ("weight_hh", "bias_hh"),
        ("weight_ih", "bias_ih"),
    ]
    assert found.state_elements == 2 * 4 * 5
    assert not found.uncovered


def test_batch_dim_moves_the_sample_axis():
    found = explain(nn.Linear(3, 5), torch.randn(7, 4, 3), batch_dim=1)
    assert found.sites[0].layout.sample_axis == 1
    assert found.state_elements == 7 * 5


def test_keyword_arguments_reach_the_model():
    found = explain(Net(lambda net, x, *, y: x * net.a + y, a=(3,)), torch.ones(4, 3), y=1.0)
    assert found.parameters["a"]


def test_where_is_asked_one_parameter_at_a_time():
    asked = []
    found = explain(
        nn.Linear(3, 5),
        torch.randn(4, 3),
        where=lambda site: asked.append(site.parameters) or site.roles == ("bias",),
    )
    assert asked == [("weight",), ("bias",)]
    assert [site.parameters for site in found.transformed] == [("bias",)]
    assert found.uncovered == {"weight": "left out by where"}


def test_sites_stand_in_the_order_of_forward_also_those_that_only_the_graph_shows():
    found = explain_net(
        lambda net, x: Scale.apply(x * net.b, net.a) + net.c.exp(), a=(3,), b=(3,), c=(3,)
    )
    assert [(site.op, site.linear) for site in found.sites] == [
        ("mul", True),
        ("scale", False),
        ("exp", False),
    ]


def test_a_site_that_no_output_depends_on_is_found():
    found = explain_net(lambda net, x: [x * net.a, x * net.b][0], a=(3,), b=(3,))
    assert len(found.transformed) == 2


# -------------------------------------------------------------------- reasons


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda net, x: x * net.a.softmax(0), "op 'softmax' is not linear in it"),
        (lambda net, x: x * net.a**2, "op 'pow' is not linear in it"),
        (lambda net, x: x * (1.0 / net.a), "op 'rdiv' is not linear in it"),
        (lambda net, x: x * torch.real(net.a + 0j).abs(), None),
        (lambda net, x: x @ (net.b @ net.b) * net.a.exp(), "op 'exp' is not linear in it"),
        (lambda net, x: Scale.apply(x, net.a), "T cannot be put into op 'scale'"),
        (lambda net, x: torch.ops.aten.mul(x, net.a), "op 'mul' is not linear in it, or not known"),
        (lambda net, x: x, "not used in this forward"),
        (lambda net, x: net.a.requires_grad_() and x, "not used in this forward"),
        (lambda net, x: (x, net.a), "returned by the model as it is"),
        (lambda net, x: {"x": x, "view": net.a[None]}, "returned by the model as it is"),
    ],
)
def test_reasons(forward, reason):
    found = explain_net(forward, a=(), b=(3, 3))
    if reason is None:
        assert "a" not in found.uncovered
    else:
        assert found.uncovered["a"].startswith(reason)


def test_the_same_parameter_twice_in_one_op_is_not_linear():
    found = explain_net(lambda net, x: x @ (net.a @ net.a), a=(3, 3))
    assert found.uncovered == {"a": "op 'matmul' takes it twice, so it is not linear in it"}
    assert found.parameters == {"a": ["(model):matmul(a)~"]}


def test_an_op_may_be_linear_in_one_parameter_and_not_in_another():
    found = explain_net(lambda net, x: x * (net.a / net.b), a=(3,), b=(3,))
    assert found.parameters == {"a": ["(model):div(a)"], "b": ["(model):div(b)~"]}
    assert list(found.uncovered) == ["b"]


def test_uses_that_are_not_linear_do_not_shift_the_numbers_of_those_that_are():
    model = Net(lambda net, x: x @ (net.a @ net.a) @ net.a, a=(3, 3))
    found = explain(model, x := torch.randn(4, 3))
    optimizer = virtualgrad.SVGD(model, lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    assert [site.key for site in found.transformed] == list(optimizer.operator.state)


def test_repeated_uses_that_are_not_linear_are_numbered():
    found = explain_net(lambda net, x: x * net.a.exp() * net.a.exp(), a=(3,))
    assert found.parameters == {"a": ["(model):exp(a)~", "(model):exp(a)~#1"]}
    assert list(found.uncovered.values()) == ["op 'exp' is not linear in it, or not known to be"]


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_fused_recurrent_kernel_says_so(layer):
    found = explain(layer(3, 5, num_layers=2), torch.randn(6, 4, 3))
    assert len(found.sites) == 1
    assert list(found.uncovered) == list(found.parameters)
    assert all("one fused multi-step kernel" in why for why in found.uncovered.values())


def test_a_second_use_in_a_custom_function_is_not_missed():
    found = explain_net(lambda net, x: Scale.apply(x * net.a, net.a), a=(3,))
    assert found.parameters == {"a": ["(model):mul(a)", "(model):scale(a)~"]}
    assert not found.uncovered


def test_assigning_a_parameter_into_a_buffer_is_seen_by_the_graph():
    def forward(net, x):
        rows = torch.zeros(4, 3)
        rows[0] = net.a
        return x * rows

    found = explain_net(forward, a=(3,))
    assert "autograd graph" in found.uncovered["a"]


def test_frozen_parameters():
    model = nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    found = explain(model, torch.randn(4, 3))
    assert found.uncovered == {"bias": "frozen (requires_grad=False)"}
    assert found.parameter_elements == 20
    assert found.rmsprop_elements == 15


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    found = explain_net(
        lambda net, x: checkpoint(lambda y: F.linear(y, net.a), x * net.b, use_reentrant=reentrant),
        a=(3, 3),
        b=(3,),
    )
    if reentrant:
        assert "while gradients are off" in found.uncovered["a"]
    else:
        assert not found.uncovered


def test_outputs_in_a_dataclass_are_looked_into():
    @dataclass
    class Result:
        value: torch.Tensor

    found = explain_net(lambda net, x: Result(Scale.apply(x, net.a)), a=(3,))
    assert found.parameters["a"] == ["(model):scale(a)~"]


def test_a_model_without_parameters():
    found = explain(nn.ReLU(), torch.randn(4, 3))
    assert found.sites == ()
    assert found.state_elements == found.adam_elements == 0
    assert "0 parameters" in str(found)


def test_a_model_on_the_meta_device_needs_no_memory():
    found = explain(nn.Linear(10**6, 10**6, device="meta"), torch.empty(4, 10**6, device="meta"))
    assert found.state_elements == 10**6


def test_parameters_in_place_of_the_model():
    with pytest.raises(ModelError, match=r"in place of the model.*explain"):
        explain(nn.Linear(3, 5).parameters(), torch.randn(4, 3))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_are_seen_through(in_place):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    if in_place:
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    found = explain(compiled, torch.randn(4, 3))
    assert found.model == "Sequential"
    assert found.parameters["0.weight"] == found.parameters["0.bias"] == ["0:linear(weight)"]
