"""SVGD is a torch.optim.Optimizer: what users do with one works."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD, VirtualGradientDescent, operators, weights_only
from virtualgrad.errors import ClaimedParameterError, DetachedError, ModelError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(15, 4)
    )


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(6, 2, 5, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def saved_and_loaded(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("options", [{}, {"stale": True, "momentum": 0.9, "weight_decay": 0.01}])
def test_resume_is_bit_exact_also_before_the_first_forward(options: dict) -> None:
    data = batches(12)
    model = network()
    optimizer = SVGD(model, 0.05, **options)
    train(model, optimizer, data[:6])
    model_state, state = copy.deepcopy(model.state_dict()), saved_and_loaded(optimizer.state_dict())
    train(model, optimizer, data[6:])

    resumed = network()
    resumed.load_state_dict(model_state)
    again = SVGD(resumed, 0.9, **options)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == 0.05
    train(resumed, again, data[6:])
    assert_same(model, resumed)
    # and the state that comes out is the state that would have come out
    first, second = optimizer.state_dict(), again.state_dict()
    assert first["state"].keys() == second["state"].keys()
    for index, entries in first["state"].items():
        for name, tensor in entries.items():
            assert torch.equal(tensor, second["state"][index][name])


def test_state_dict_holds_r_in_float32_for_a_bfloat16_model() -> None:
    model = nn.Linear(4, 3).bfloat16()
    optimizer = SVGD(model, 0.1)
    x = torch.randn(5, 4).bfloat16()
    torch._C._set_mkldnn_enabled(False)  # see without_onednn in test_not_yet.py
    model(x).square().mean().backward()
    torch._C._set_mkldnn_enabled(True)
    optimizer.step()
    other = SVGD(copy.deepcopy(model), 0.1)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    (kept,) = other.operator.state.values()
    (expected,) = optimizer.operator.state.values()
    assert kept["r"].dtype == torch.float32
    assert torch.equal(kept["r"], expected["r"])


def test_learning_rate_schedulers() -> None:
    model, reference = network(), network()
    optimizer = SVGD(model, 0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1),
        ],
        milestones=[2],
    )
    by_hand = SVGD(reference, 0.1)
    for batch in batches(5):
        by_hand.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        train(model, optimizer, [batch])
        train(reference, by_hand, [batch])
        scheduler.step()
    assert_same(model, reference)
    assert optimizer.param_groups[0]["lr"] < 0.01


def test_closure_and_zero_grad() -> None:
    model, reference = network(), network()
    optimizer, by_hand = SVGD(model, 0.05), SVGD(reference, 0.05)
    for x, y in batches(3):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.requires_grad
        by_hand.zero_grad(set_to_none=False)
        F.cross_entropy(reference(x), y).backward()
        by_hand.step()
    assert_same(model, reference)
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_groups_have_their_own_numbers() -> None:
    """Every group alone, the rest with lr 0: its part is what one optimizer per group would do."""
    numbers = [
        {"lr": 0.1, "scale": 0.5, "rho": 0.5, "eps": 1e-4, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.01, "scale": 2.0, "rho": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    ]
    model = network()
    parts = [list(model[0].parameters()), list(model[3].parameters())]
    optimizer = SVGD(
        model, 1.0, params=[{"params": p, **n} for p, n in zip(parts, numbers, strict=True)]
    )
    train(model, optimizer, batches(1))
    for index, values in enumerate(numbers):
        alone = network()
        train(alone, SVGD(alone, **values), batches(1))
        layer = (0, 3)[index]
        assert_same(model[layer], alone[layer])


def test_weight_and_bias_in_different_groups_get_a_state_each() -> None:
    model, one = network(), network()
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "rho": 0.5},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "rho": 0.9},
    ]
    optimizer = SVGD(model, 0.1, params=groups)
    train(model, optimizer, batches(3))
    assert len(optimizer.operator.state) == 4
    half = SVGD(one, 0.1, rho=0.5)
    train(one, half, batches(1))
    fresh = network()
    split = SVGD(
        fresh,
        0.1,
        params=[
            {
                "params": [p for n, p in fresh.named_parameters() if n.endswith("weight")],
                "rho": 0.5,
            },
            {"params": [p for n, p in fresh.named_parameters() if n.endswith("bias")]},
        ],
    )
    train(fresh, split, batches(1))
    assert torch.equal(fresh[0].weight, one[0].weight)
    assert not torch.equal(fresh[0].bias, one[0].bias)
    again = network()
    resumed = SVGD(
        again,
        0.1,
        params=[
            {"params": [p for n, p in again.named_parameters() if n.endswith("weight")]},
            {"params": [p for n, p in again.named_parameters() if n.endswith("bias")]},
        ],
    )
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert resumed.operator.state.keys() == optimizer.operator.state.keys()


def test_a_part_of_the_model_may_be_left_to_another_optimizer() -> None:
    model = network()
    svgd = SVGD(model, 0.1, params=model[0].parameters())
    adamw = torch.optim.AdamW(model[3].parameters(), 0.01)
    reference = network()
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(reference[3].parameters(), 0.01)
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(reference(x), y).backward()
    assert torch.equal(model[3].weight.grad, reference[3].weight.grad)  # plain for AdamW
    assert not torch.allclose(model[0].weight.grad, reference[0].weight.grad)
    svgd.step()
    adamw.step()
    plain.step()
    assert_same(model[3], reference[3])


def test_two_svgd_with_disjoint_parameters_on_one_model() -> None:
    model, whole = network(), network()
    first = SVGD(model, 0.1, params=model[0].parameters())
    second = SVGD(model, 0.1, params=[model[3].weight])
    third = SVGD(model, 0.1, params=[model[3].bias])
    one = SVGD(whole, 0.1)
    for x, y in batches(3):
        for optimizer in (first, second, third, one):
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(whole(x), y).backward()
        for optimizer in (first, second, third, one):
            optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    first.detach()
    third.detach()
    second.detach()
    assert [type(module) for module in model] == [nn.Conv1d, nn.ReLU, nn.Flatten, nn.Linear]


def test_two_svgd_that_claim_one_parameter_are_an_error() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    with pytest.raises(ClaimedParameterError, match=r"'0\.weight'.*call detach\(\)"):
        SVGD(model, 0.1)
    optimizer.detach()
    SVGD(model, 0.1).detach()


def test_an_optimizer_that_nobody_holds_gives_the_model_free() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # makes a reference cycle
    train(model, optimizer, batches(1))
    del optimizer
    second = SVGD(model, 0.1)
    gc.collect()
    train(model, second, batches(1))
    assert len(second.operator.state) == 2


def test_add_param_group_attaches_new_layers() -> None:
    model = network()
    optimizer = SVGD(model, 0.1, params=model[0].parameters())
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model[4].parameters(), "scale": 0.5})
    train(model, optimizer, batches(2))
    assert "4:linear(weight)" in optimizer.operator.state
    assert "3:linear(weight)" not in optimizer.operator.state
    with pytest.raises(ModelError, match="no parameter of the model"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def test_frozen_parameters_stay_and_thaw() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = SVGD(model, 0.1, weight_decay=0.1)
    train(model, optimizer, batches(2))
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    train(model, optimizer, batches(2))
    assert not torch.equal(model[0].weight, before)
    assert "0:conv1d(weight)" in optimizer.operator.state


def test_a_parameter_without_a_linear_site_trains_by_its_plain_gradient() -> None:
    class Exponential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w.exp()

    model = Exponential()
    other = copy.deepcopy(model)
    x = torch.randn(5, 3)
    for m, optimizer in (
        (model, SVGD(model, 0.1)),
        (other, torch.optim.SGD(other.parameters(), 0.1)),
    ):
        m(x).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.w, other.w)
    assert not torch.equal(model.w, torch.zeros(3))


def test_sparse_embedding_gradients() -> None:
    torch.manual_seed(0)
    dense, sparse = nn.Embedding(10, 3), nn.Embedding(10, 3, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    tokens = torch.randint(0, 10, (4, 2))
    for model in (dense, sparse):
        optimizer = SVGD(model, 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
    assert sparse.weight.grad.is_sparse
    torch.testing.assert_close(dense.weight, sparse.weight)


def test_released_method_transforms_only_weights() -> None:
    model = network()
    optimizer = SVGD.released(model, 0.1, 0.01)
    plain = network()
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(plain(x), y).backward()
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad)  # another order of summing
    assert torch.equal(model[3].bias.grad, plain[3].bias.grad)
    # the first step divides by sqrt(0 + eps)
    torch.testing.assert_close(model[3].weight.grad, plain[3].weight.grad * (0.01 / 1e-6**0.5))
    optimizer.step()
    assert len(optimizer.operator.state) == 2


def test_detach_and_with_block_put_the_model_back() -> None:
    model = network()
    classes = [type(module) for module in model.modules()]
    with SVGD(model, 0.1) as optimizer:
        train(model, optimizer, batches(1))
        assert [type(module) for module in model.modules()] != classes
    assert [type(module) for module in model.modules()] == classes
    with pytest.raises(DetachedError, match="make a new SVGD"):
        optimizer.step()
    plain = copy.deepcopy(model)
    x, y = batches(1)[0]
    for m in (model, plain):
        m.zero_grad()
        F.cross_entropy(m(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_copied_or_unpickled_optimizer_is_not_silently_sgd() -> None:
    model = network()
    optimizer = SVGD(model, 0.1)
    train(model, optimizer, batches(1))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(DetachedError):
            other.step()
        assert "detached" in repr(other)


def test_repr_can_be_read() -> None:
    model = network()
    text = repr(SVGD(model, 0.1, scale=0.01))
    assert text.splitlines()[0] == "SVGD on Sequential: 85 parameters"
    assert "lr=0.1" in text and "scale=0.01" in text and "4 tensors" in text


def test_virtual_gradient_descent_takes_any_operator() -> None:
    model = nn.Linear(3, 2)
    optimizer = VirtualGradientDescent(model, 0.1, lambda g, site: 2 * g, where=weights_only)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3)
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert torch.equal(model.weight.grad, 2 * plain.weight.grad)
    assert torch.equal(model.bias.grad, plain.bias.grad)
    optimizer.step()


def test_stateful_operator_resumes_inside_a_composition() -> None:
    def make(model: nn.Module) -> VirtualGradientDescent:
        momentum = operators.on_sigma(operators.momentum, c=0.5)
        return VirtualGradientDescent(model, 0.1, operators.compose(momentum, operators.RMS()))

    data = batches(6)
    model = network()
    optimizer = make(model)
    train(model, optimizer, data[:3])
    middle, state = copy.deepcopy(model.state_dict()), saved_and_loaded(optimizer.state_dict())
    train(model, optimizer, data[3:])
    resumed = network()
    resumed.load_state_dict(middle)
    again = make(resumed)
    again.load_state_dict(state)
    train(resumed, again, data[3:])
    assert_same(model, resumed)
