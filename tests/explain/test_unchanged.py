"""explain() leaves a model, its optimizer and the random numbers as they were."""

import copy
import random

import pytest
import torch
from torch import nn

import virtualgrad
from virtualgrad.explain import explain
from virtualgrad.virtual import attachments_of


class Remembering(nn.Module):
    """Changes whatever a forward can change."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.shared = nn.BatchNorm1d(4)
        self.shared.register_buffer("unset", None)
        self.register_buffer("count", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.count += 1
        random.random()
        self.last = self.body(x)
        self.late = True
        return self.shared(self.last)


def fingerprint(model):
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [(type(module), module.training) for module in model.modules()],
        [parameter.grad for parameter in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
    )


def assert_same(before, after):
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert before[1] == after[1]
    assert all(one is other for one, other in zip(before[2], after[2], strict=True))
    assert torch.equal(before[3], after[3])
    assert before[4] == after[4]


@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(training):
    model = Remembering().train(training)
    model(x := torch.randn(5, 3)).sum().backward()
    del model.late
    last, buffers = model.last, list(model.buffers())
    before = fingerprint(model)
    explain(model, x)
    assert_same(before, fingerprint(model))
    assert model.last is last
    assert not hasattr(model, "late")
    assert all(one is other for one, other in zip(buffers, model.buffers(), strict=True))


def test_a_graph_that_waits_for_its_backward_stays_valid():
    model = Remembering().eval()
    loss = model(torch.randn(5, 3)).sum()
    explain(model, torch.randn(5, 3))
    loss.backward()  # it has saved the running statistics


def test_nothing_changes_where_forward_fails():
    model = Remembering()
    model(torch.randn(5, 3))  # what the next one would change
    optimizer, x = virtualgrad.SVGD(model, lr=0.1), torch.randn(5, 3)
    model.shared.eps = "not a number"
    before = fingerprint(model)
    with pytest.raises(TypeError):
        explain(model, x)
    assert_same(before, fingerprint(model))
    assert attachments_of(model) == [optimizer._attachment]


def test_the_same_model_gives_the_same_explanation():
    model, x = Remembering(), torch.randn(5, 3)
    first, second = explain(model, x), explain(model, x)
    assert first == second
    assert first.to_dot() == second.to_dot()
    assert str(first) == str(second)


def test_classes_are_restored():
    model = Remembering()
    explain(model, torch.randn(5, 3))
    assert type(model) is Remembering
    assert type(model.body[0]) is nn.Linear
    assert not attachments_of(model)


def test_an_attached_optimizer_is_paused_and_goes_on():
    model, x = Remembering(), torch.randn(5, 3)
    model.body[2].p = 0.0
    plain = explain(model, x)
    twin = copy.deepcopy(model)
    optimizers = [virtualgrad.SVGD(net, lr=0.1) for net in (model, twin)]
    for step in range(2):
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            if net is model:
                assert explain(net, x) == plain
            net(x).square().sum().backward()
            if net is model and step == 0:
                explain(net, x)
            optimizer.step()
            optimizer.zero_grad()
    assert attachments_of(model) == [optimizers[0]._attachment]
    assert optimizers[0].operator.state.keys() == optimizers[1].operator.state.keys()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_it_works_without_gradients_around_it_and_leaves_them_off():
    with torch.no_grad():
        found = explain(nn.Linear(3, 4), torch.randn(5, 3))
        assert not torch.is_grad_enabled()
    assert len(found.transformed) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_random_numbers_and_fused_kernels_on_a_gpu():
    model, x = nn.Sequential(nn.Dropout(0.5), nn.LSTM(3, 4)).cuda(), torch.randn(6, 5, 3).cuda()
    before = torch.cuda.get_rng_state()
    found = explain(model, x)
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert all("fused" in reason for reason in found.uncovered.values())
