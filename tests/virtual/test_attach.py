"""Attaching changes the backward pass of parameters, and nothing else."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from virtualgrad import SVGD, VirtualGradientDescent, operators, virtual_grad
from virtualgrad.virtual import Attachment, Intercept, named_parameters


class Network(nn.Module):
    """At module level, so that pickle finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.norm(x) * (2 if twice else 1)


class CopiesItself(nn.Linear):
    """A class with its own way to copy: it calls its own type."""

    def __deepcopy__(self, memo: Any) -> CopiesItself:
        other = type(self)(self.in_features, self.out_features)
        other.load_state_dict(self.state_dict())
        return other


class ReducesItself(nn.Module):
    """A class with its own way to be pickled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.width = width

    def __reduce__(self) -> Any:
        return type(self), (self.width,), {"width": self.width, **self.__dict__}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def test_copies_and_pickles_are_plain_models() -> None:
    model = network()
    keys = list(model.state_dict())
    with SVGD(model, 0.1):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        others = [
            copy.deepcopy(model),
            copy.copy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ]
        assert list(model.state_dict()) == keys
        for other in others[:1] + others[2:]:
            assert [type(m) for m in other.modules()] == [
                Network,
                nn.ModuleList,
                nn.Linear,
                nn.Linear,
                nn.BatchNorm1d,
            ]
            assert all(
                torch.equal(a, b)
                for a, b in zip(model.parameters(), other.parameters(), strict=True)
            )
        assert type(others[1]) is Network
        assert repr(model) == repr(others[0])
        assert inspect.signature(model.forward) == inspect.signature(others[0].forward)


def test_classes_that_copy_or_pickle_themselves() -> None:
    linear = CopiesItself(3, 2)
    reduced = ReducesItself(3)
    x = torch.randn(4, 3)
    with SVGD(nn.ModuleList([linear, reduced]), 0.1):
        other = copy.deepcopy(linear)
        other(x).sum().backward()  # plain gradient: the copy is not the attached module
        assert torch.equal(other.bias.grad, torch.full((2,), 4.0))
        assert type(pickle.loads(pickle.dumps(reduced))) is ReducesItself


def test_outputs_and_no_grad_forwards_are_untouched() -> None:
    model = network()
    plain = copy.deepcopy(model)
    x = torch.randn(6, 4)
    optimizer = SVGD(model, 0.1)
    assert torch.equal(model(x, twice=True), plain(x, twice=True))
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))
    model(x)  # eval with grad: builds a graph, changes no state
    assert optimizer.operator.state == {}
    assert optimizer.state_dict()["state"] == {}


def test_forwards_without_backward_do_not_shift_the_sites() -> None:
    model = network()
    reference = copy.deepcopy(model)
    optimizer, undisturbed = SVGD(model, 0.1), SVGD(reference, 0.1)
    kept = []
    for _ in range(3):
        x = torch.randn(6, 4)
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        model(x)  # thrown away
        reference(x), reference(x)  # batch norm's running statistics see the same
        undisturbed.zero_grad()
        for m, o in ((model, optimizer), (reference, undisturbed)):
            m(x).square().mean().backward()
            o.step()
        kept.append(model(x))  # kept alive over the step, never used
    assert optimizer.operator.state.keys() == undisturbed.operator.state.keys()
    assert not any("#" in key for key in optimizer.operator.state)


def test_two_calls_before_one_backward_are_two_sites() -> None:
    """A siamese loss: one graph with two uses of every layer, as the topology sees it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    plain = copy.deepcopy(model)
    optimizer = SVGD(model, 0.0)
    rms = operators.RMS()
    for _ in range(3):
        a, b = torch.randn(5, 3).double(), torch.randn(5, 3).double()
        optimizer.zero_grad()
        (model(a).square().mean() + model(b).sin().mean()).backward()
        expected = virtual_grad(
            plain(a).square().mean() + plain(b).sin().mean(), plain.parameters(), rms, batch_size=5
        )
        for p, v in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, v, rtol=1e-12, atol=1e-14)
        optimizer.step()
    assert set(optimizer.operator.state) == {
        "(model):linear(weight)",
        "(model):linear(weight)#1",
    }


def test_accumulation_is_not_two_sites() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    for _ in range(3):
        model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    assert len(optimizer.operator.state) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients_and_counts_once(reentrant: bool) -> None:
    class Checkpointed(Network):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(checkpoint(layer, x, use_reentrant=reentrant))
            return self.norm(x)

    torch.manual_seed(0)
    model = Checkpointed()
    plain = Network()
    plain.load_state_dict(model.state_dict())
    pairs = [(model, SVGD(model, 0.1)), (plain, SVGD(plain, 0.1))]
    for _ in range(3):
        x = torch.randn(6, 4, requires_grad=True)
        for m, optimizer in pairs:
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    states = [optimizer.operator.state for _, optimizer in pairs]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert torch.equal(state["r"], states[1][key]["r"])


def test_parts_of_a_model_may_be_called_by_themselves() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)})
    optimizer = SVGD(model, 0.1)
    x = torch.randn(6, 4)
    (model["decoder"](torch.tanh(model["encoder"](x))) - x).square().mean().backward()
    optimizer.step()
    assert set(optimizer.operator.state) == {
        "encoder:linear(weight)",
        "decoder:linear(weight)",
    }


def test_in_place_op_on_a_view_equals_the_same_model_out_of_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.randn(5))
            self.gain = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y[:, 0] += self.shift
            y[:, 1] *= self.gain
            return y

    class OutOfPlace(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            columns = [x[:, 0] + self.shift, x[:, 1] * self.gain, *x[:, 2:].unbind(1)]
            return torch.stack(columns, 1)

    torch.manual_seed(0)
    first, second = InPlace(), OutOfPlace()
    second.load_state_dict(first.state_dict())
    x = torch.randn(6, 3, 5, requires_grad=True)
    gradients = []
    for model in (first, second):
        optimizer = SVGD(model, 0.1)
        x.grad = None
        model(x).square().mean().backward()
        gradients.append((model.shift.grad, model.gain.grad, x.grad))
        optimizer.detach()
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_fused_recurrent_kernels_are_one_nonlinear_op(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = layer(4, 3, num_layers=2, batch_first=True, bidirectional=True)
    plain = copy.deepcopy(model)
    x = torch.randn(5, 6, 4)
    with SVGD(model, 0.1) as optimizer:
        output = model(x)[0]
        assert torch.equal(output, plain(x)[0])
        output.square().mean().backward()
        plain(x)[0].square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        optimizer.step()
        assert optimizer.operator.state == {}


def test_a_custom_function_trains_by_its_plain_gradient() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return 2 * x * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return 2 * g * w, (2 * g * x).sum(0)

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(x, self.w) + x * self.w

    torch.manual_seed(0)
    model = Custom()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3)
    expected = virtual_grad(plain(x).square().sum(), [plain.w], operators.Sign())
    with VirtualGradientDescent(model, 0.1, operators.Sign()):
        model(x).square().sum().backward()
    torch.testing.assert_close(model.w.grad, expected[0])
    g = 2 * plain(x)
    by_hand = (2 * g * x).sum(0) + (g.sign() * x).sum(0)  # identity there, T here
    torch.testing.assert_close(model.w.grad, by_hand)


def test_several_losses_and_penalties_on_parameters() -> None:
    """An L1 penalty in the loop is not linear: its gradient comes on top, untransformed."""
    torch.manual_seed(0)
    model = network()
    without = copy.deepcopy(model)
    x, y = torch.randn(6, 4), torch.randint(0, 4, (6,))
    with SVGD(model, 0.1), SVGD(without, 0.1):
        penalty = sum(p.abs().sum() for p in model.parameters())
        (F.cross_entropy(model(x), y) + 0.01 * penalty).backward()
        F.cross_entropy(without(x), y).backward()
    for p, q in zip(model.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad + 0.01 * p.sign())


def test_ddp_and_compile_wrappers_are_looked_through() -> None:
    model = network()
    wrapped = torch.compile(model, backend="eager")
    assert list(named_parameters(wrapped)) == [name for name, _ in model.named_parameters()]
    intercept = Intercept(named_parameters(model), operators.identity)
    with Attachment(wrapped, intercept) as attachment:
        assert attachment.model is model


def test_a_model_without_tensor_inputs() -> None:
    class Function(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor([3.0, -2.0]))

        def forward(self) -> Tensor:
            return (self.x * torch.tensor([1.0, 10.0])).square().sum()

    model = Function()
    optimizer = SVGD(model, 0.1, rho=0.0, eps=1e-12)
    model().backward()
    # no sample axis: r = g^2, T(g) = sign(g), pulled back by the factors 1 and 10
    torch.testing.assert_close(model.x.grad, torch.tensor([1.0, -10.0]))
    optimizer.step()


def test_a_forward_on_the_module_itself_does_not_hide_its_ops() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    model = Raw()
    original = model.forward
    model.forward = lambda x: original(x) + 0  # type: ignore[method-assign]
    x = torch.randn(4, 3)
    with VirtualGradientDescent(model, 0.1, lambda g, site: 3 * g):
        model(x).sum().backward()
    torch.testing.assert_close(model.w.grad, 3 * x.sum(0)[:, None].expand(3, 2))
    assert type(model) is Raw


def test_an_overwritten_copy_is_no_longer_the_parameter() -> None:
    class Absolute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w.clone().abs_()

    torch.manual_seed(0)
    model = Absolute()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3)
    (expected,) = virtual_grad(plain(x).square().sum(), [plain.w], operators.Sign())
    with VirtualGradientDescent(model, 0.1, operators.Sign()):
        model(x).square().sum().backward()
    torch.testing.assert_close(model.w.grad, expected)


def test_a_layer_that_is_left_out_is_looked_at_again_with_another_bias() -> None:
    """What is remembered of a layer holds for its own parameters only."""

    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.first, self.second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
            self.turn = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            bias = self.first if self.turn < 3 else self.second
            return torch.nn.functional.linear(x, self.weight, bias)

    torch.manual_seed(0)
    model = Borrowing()
    optimizer = SVGD(model, 0.1, where=lambda site: site.parameters == ("second",), stale=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    assert [key for key in optimizer.operator.state if "linear" in key]


def test_a_layer_that_is_remembered_sees_a_parameter_as_its_input() -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(4, 3), nn.Parameter(torch.randn(6, 4))

        def forward(self, x: torch.Tensor, use_table: bool) -> torch.Tensor:
            return self.layer(self.table if use_table else x)

    model = Mixed()
    optimizer = SVGD(model, 0.1)
    for use_table in (False, False, True):
        optimizer.zero_grad()
        model(torch.randn(6, 4), use_table).square().mean().backward()
        plain = copy.deepcopy(model)
        plain.zero_grad()
        plain(torch.randn(6, 4), True).square().mean().backward()
    assert not torch.allclose(model.table.grad, plain.table.grad, rtol=0.1)
