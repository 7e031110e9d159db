"""suggest(): numbers that can be computed by hand, and what it refuses."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from virtualgrad import SVGD, suggest
from virtualgrad.errors import HyperparameterError, LossError, ModelError, NonFiniteError
from virtualgrad.settings import SettingsError
from virtualgrad.settings.choose import _verdict
from virtualgrad.settings.current import read_current
from virtualgrad.settings.measure import EPS
from virtualgrad.settings.suggestion import Trials

X = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
Y = torch.zeros(2, 1, dtype=torch.float64)


def half_square(output, target):
    """J = (1/m) sum of (sigma - y)^2 / 2, so g = (sigma - y) / m."""
    return (output - target).square().mean() / 2


def one_layer():
    """Weights (1, 1) and bias 0: sigma = (1, 2), g = (1/2, 1), r = (1/4 + 1) / 2 = 5/8."""
    model = nn.Linear(2, 1).double()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    return model


R = 5 / 8
GRADIENT_W = math.hypot(0.5, 2.0)  # g @ x
GRADIENT_B = 1.5
ROOT = math.sqrt(R + EPS)


def sizes_of(suggestion):
    return {size.name: size for size in suggestion.sizes}


def test_one_layer_from_sgd_by_hand():
    model = one_layer()
    found = suggest(model, half_square, [(X, Y)], current=torch.optim.SGD(model.parameters(), 0.1))
    weight, bias = sizes_of(found)["weight"], sizes_of(found)["bias"]
    assert weight.gradient == pytest.approx(GRADIENT_W)
    assert weight.virtual == pytest.approx(GRADIENT_W / ROOT)
    assert weight.weight == pytest.approx(math.sqrt(2))
    assert weight.step == pytest.approx(0.1 * GRADIENT_W)
    assert (bias.gradient, bias.virtual, bias.weight) == (pytest.approx(GRADIENT_B), None, 0.0)
    assert (weight.linear, bias.linear) == (0.0, None)
    assert found.lr == 0.1
    # The rule says 0.002 / 0.1, equal steps say |gradient| / |V| = sqrt(r + eps) = 0.7906.
    assert list(found.trials.tried)[:2] == [0.02, 0.79]
    assert found.trials.before == pytest.approx((1 + 4) / 4)


def test_the_current_optimizer_is_tried_as_it_is():
    """One batch, one step of SGD: the loss after it, by hand."""
    model = one_layer()
    found = suggest(model, half_square, [(X, Y)], current=torch.optim.SGD(model.parameters(), 0.1))
    weight, bias = torch.tensor([1 - 0.05, 1 - 0.2]), -0.15
    sigma = torch.stack([weight[0] + bias, 2 * weight[1] + bias])
    assert found.trials.current == pytest.approx(float(sigma.square().mean() / 2), rel=1e-6)


def test_where_every_scale_blows_up_the_bound_by_the_plain_gradient_is_taken():
    """With r = 0 the first T is s / sqrt(eps), 20 and 790 here: too much. s = sqrt(eps) is SGD."""
    model = one_layer()
    found = suggest(model, half_square, [(X, Y)], current=torch.optim.SGD(model.parameters(), 0.3))
    assert min(list(found.trials.tried.values())[:2]) > found.trials.before
    assert found.scale == pytest.approx(math.sqrt(EPS))
    assert found.trials.svgd == pytest.approx(found.trials.current, rel=1e-9)


def test_one_layer_from_adam_by_hand():
    model, lr = one_layer(), 0.003
    current = torch.optim.Adam(model.parameters(), lr, eps=0.0)
    found = suggest(model, half_square, [(X, Y)], current=current)
    weight, bias = sizes_of(found)["weight"], sizes_of(found)["bias"]
    assert weight.step == pytest.approx(lr * math.sqrt(2))  # each of two numbers moves by lr
    assert bias.step == pytest.approx(lr)
    assert found.lr == pytest.approx(lr / GRADIENT_B)  # 0.002: the bias steps as before
    by_rule, by_steps = list(found.trials.tried)[:2]
    assert by_rule == pytest.approx(lr / found.lr)  # 1.5
    expected = lr * math.sqrt(2) / (found.lr * GRADIENT_W / ROOT)
    assert by_steps == float(f"{expected:.2g}")


def test_rms_and_gradient_are_means_over_batches():
    model = one_layer()
    batches = [(X, Y), (2 * X, Y)]  # sigma, g twice as large; g @ x four times
    current = torch.optim.SGD(model.parameters(), 0.001)
    weight = sizes_of(suggest(model, half_square, batches, current=current))["weight"]
    root = math.sqrt((R + 4 * R) / 2 + EPS)
    over_batches = math.sqrt((1 + 16) / 2) * GRADIENT_W
    assert weight.gradient == pytest.approx(over_batches)
    assert weight.virtual == pytest.approx(over_batches / root)


def test_momentum_counts_and_weight_decay_is_kept():
    model = one_layer()
    sgd = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9, weight_decay=0.5)
    found = suggest(model, half_square, [(X, Y)], current=sgd)
    assert found.lr == pytest.approx(0.01)
    assert found.weight_decay == 0.5  # lr * weight_decay: what a step takes away
    assert "lr / (1 - momentum)" in found.reasons[0]
    adamw = torch.optim.AdamW(model.parameters(), 0.003, weight_decay=0.1)
    found = suggest(model, half_square, [(X, Y)], current=adamw)
    assert found.lr * found.weight_decay == pytest.approx(0.003 * 0.1)


def test_without_a_parameter_that_has_no_t_only_the_product_matters():
    model = nn.Linear(2, 1, bias=False).double()
    current = torch.optim.Adam(model.parameters(), 0.001)
    found = suggest(model, half_square, [(X, Y + 1)], current=current)
    assert found.lr == pytest.approx(0.1)
    assert "only scale * lr matters" in found.reasons[0]


def test_where_r_is_small_t_is_linear_and_it_is_said():
    model = one_layer()
    found = suggest(
        model,
        lambda output, target: 1e-6 * half_square(output, target),
        [(X, Y)],
        current=torch.optim.SGD(model.parameters(), 0.1),
    )
    weight = sizes_of(found)["weight"]
    assert weight.linear == 1.0
    assert weight.virtual / weight.gradient == pytest.approx(1 / math.sqrt(EPS), rel=1e-5)
    assert any("At 1 of 1 weights r is mostly below eps" in reason for reason in found.reasons)


def test_it_builds_the_optimizer_and_reads_well():
    model = one_layer()
    current = torch.optim.SGD(model.parameters(), 0.05, weight_decay=0.01)
    found = suggest(model, half_square, [(X, Y)], current=current)
    (group,) = found.optimizer(model, momentum=0.5).param_groups
    assert {name: group[name] for name in found.kwargs} == found.kwargs
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.01)
    text = str(found)
    assert text == repr(found)
    assert text.startswith(f"SVGD.released(model, lr=0.05, scale={found.scale:g}, weight_decay=0.0")
    assert all(len(line) <= 100 for line in text.splitlines())
    (row,) = [line.split() for line in text.splitlines() if line.startswith("weight ")]
    assert row[:3] == ["weight", "T", f"{GRADIENT_W:.2g}"]
    ratio = found.scale / ROOT
    assert row[4] == f"{ratio:.2g}"
    assert row[7] == f"{ratio:.2g}"  # SVGD's step over SGD's, at the same lr
    (bias,) = [line.split() for line in text.splitlines() if line.startswith("bias ")]
    assert bias[1:] == ["-", "1.5", "-", "-", "-", "-", "1", "-"]


def losses_in(reason):
    """The numbers before "before" and "with": the losses that a reason names, as written."""
    return re.findall(r"([\d.e+-]+|inf|nan) (?:before|with)", reason)


@pytest.mark.parametrize("factor", [1.0, 0.1, 0.01], ids=["far", "near", "very-near"])
def test_losses_are_written_with_as_many_digits_as_tell_them_apart(factor):
    """Losses near 2.3 that differ by less and less: "2.3 with SGD, 2.3 with SVGD" says nothing."""
    model = one_layer()
    found = suggest(
        model,
        lambda output, target: 2.3 + factor * half_square(output, target),
        [(X, Y)],
        current=torch.optim.SGD(model.parameters(), 0.1),
    )
    (tried,) = [losses_in(reason) for reason in found.reasons if "Tried on copies" in reason]
    (verdict,) = [losses_in(reason) for reason in found.reasons if "Loss on these" in reason]
    trials = found.trials
    losses = [*trials.tried.values(), trials.before, trials.current, trials.svgd]
    written = [*tried, *verdict]
    assert [float(text) for text in written] == pytest.approx(losses, rel=5e-3)
    assert len(losses) >= 5 and len(set(losses)) == len(set(written))
    order = sorted(range(len(losses)), key=losses.__getitem__)
    assert [float(written[i]) for i in order] == sorted(map(float, written))


def test_losses_that_seven_digits_cannot_tell_apart_are_alike():
    """float32 holds no more digits, so there is nothing to choose between the two."""
    model = one_layer()
    current = read_current(sgd(model), dict(model.named_parameters()))
    trials = Trials(2.0, 1.5, 1.5 + 1e-9, {0.01: 1.5 + 1e-9})
    verdict = _verdict(current, trials)
    assert losses_in(verdict) == ["2", "1.5", "1.5"] and verdict.endswith("Go ahead.")
    worse = Trials(2.0, 1.5, 1.5 + 2e-6, {0.01: 1.5 + 2e-6})
    verdict = _verdict(current, worse)
    assert losses_in(verdict) == ["2", "1.5", "1.500002"] and "less quickly" in verdict


def test_batches_of_any_kind():
    model = one_layer()
    current = torch.optim.SGD(model.parameters(), 0.01)
    pairs = suggest(model, half_square, [(X, Y)], current=current)
    dicts = suggest(
        model,
        lambda net, batch: half_square(net(batch["x"]), batch["y"]),
        [{"x": X, "y": Y}],
        current=current,
    )
    assert dicts == pairs


def test_only_the_first_few_batches_are_used():
    seen = []

    def stream():
        for number in range(100):
            seen.append(number)
            yield X, Y

    model = one_layer()
    found = suggest(
        model, half_square, stream(), current=torch.optim.SGD(model.parameters(), 0.01), count=3
    )
    assert (found.batches, seen) == (3, [0, 1, 2])


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.01)


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_batches(batches):
    model = one_layer()
    with pytest.raises(SettingsError, match="given: no batches"):
        suggest(model, half_square, batches, current=sgd(model))


def test_a_count_of_zero():
    model = one_layer()
    with pytest.raises(SettingsError, match="count=0"):
        suggest(model, half_square, [(X, Y)], current=sgd(model), count=0)


def test_a_loss_that_is_no_scalar():
    model = one_layer()
    for loss_fn, given in (
        (lambda output, target: output - target, r"Tensor of shape \(2, 1\)"),
        (lambda output, target: 1.0, "float without a graph"),
        (lambda output, target: target.sum(), r"Tensor of shape \(\)"),
    ):
        with pytest.raises(LossError, match=given):
            suggest(model, loss_fn, [(X, Y)], current=sgd(model))


def test_a_loss_that_is_not_finite():
    model = one_layer()
    with pytest.raises(NonFiniteError, match="a loss of nan"):
        suggest(model, half_square, [(X, Y * math.nan)], current=sgd(model))


def test_a_loss_that_depends_on_nothing():
    model = one_layer()
    with pytest.raises(LossError, match="gradient is zero"):
        suggest(
            model, lambda out, target: 0 * half_square(out, target), [(X, Y)], current=sgd(model)
        )


def test_a_model_without_a_site_for_t():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x):
            return (self.gain.exp() * x).sum(1, keepdim=True)

    model = Scales()
    with pytest.raises(ModelError, match="Scales, in which no product or convolution"):
        suggest(model, half_square, [(X, Y)], current=sgd(model))


def test_other_wrong_uses():
    model = one_layer()
    with pytest.raises(ModelError, match="in place of the model"):
        suggest(model.parameters(), half_square, [(X, Y)], current=sgd(model))
    with pytest.raises(SettingsError, match="current=SVGD"):
        suggest(model, half_square, [(X, Y)], current=SVGD(model, 0.1))
    zero = sgd(model)
    zero.param_groups[0]["lr"] = 0.0
    with pytest.raises(HyperparameterError, match="lr=0"):
        suggest(model, half_square, [(X, Y)], current=zero)


def test_a_model_that_cannot_be_copied():
    model = one_layer()
    current = sgd(model)
    model.kept = model(X)
    with pytest.raises(ModelError, match="cannot be copied"):
        suggest(model, half_square, [(X, Y)], current=current)


def test_small_numbers_in_half_precision_are_not_lost():
    """Gradients near 1e-6: their squares are below what float16 can hold."""
    model = one_layer().half()

    def loss_fn(output, target):
        return 1e-6 * half_square(output.float(), target)

    found = suggest(model, loss_fn, [(X.half(), Y.float())], current=sgd(model))
    weight = sizes_of(found)["weight"]
    assert weight.gradient == pytest.approx(1e-6 * GRADIENT_W, rel=0.1)  # few digits are left
    assert weight.step == pytest.approx(0.01 * weight.gradient)


def test_sparse_gradients():
    torch.manual_seed(0)
    tokens, y = torch.tensor([[0, 2], [2, 1]]), torch.tensor([0, 1])
    sizes = []
    for sparse in (False, True):
        torch.manual_seed(1)
        table = nn.Embedding(5, 3, sparse=sparse)
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 2))
        found = suggest(model, F.cross_entropy, [(tokens, y)], current=sgd(model))
        sizes.append(found.sizes)
        assert sizes_of(found)["0.weight"].gradient > 0
    assert sizes[0] == sizes[1]


def test_it_is_the_optimizers_virtual_gradient():
    """V with s, times lr, is the step that SVGD itself makes once r has settled."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    x, y = torch.randn(7, 1, 6, 6).double(), torch.randint(0, 4, (7,))
    found = suggest(net, F.cross_entropy, [(x, y)], current=sgd(net))
    optimizer = SVGD.released(net, lr=1e-12, scale=found.scale)  # r settles, the weights stay
    for _ in range(400):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    norms = {name: float(p.grad.norm()) for name, p in net.named_parameters()}
    for size in found.sizes:
        assert found.step(size) == pytest.approx(found.lr * norms[size.name], rel=1e-6)
