"""Single steps, against Taylor's formula, the corollary and cases with a known answer."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from virtualgrad.lab.figures.decrease import (
    log_cosh,
    random_positive,
    ratio_of_means,
    step_random_jacobians,
    summarize,
)
from virtualgrad.lab.figures.decrease_networks import (
    Labels,
    corollary_in,
    random_mlp,
    random_task,
    step_networks,
)

ALPHAS = (1e-4, 1e-2, 30.0)


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_random_jacobians_lower_the_loss_as_the_corollary_predicts(spread):
    sweep = step_random_jacobians(spread, ALPHAS, trials=5000)
    smallest, _, largest = sweep.steps
    assert abs(sweep.slope - 1) < 4 * sweep.slope_error < 0.1
    assert smallest.ratio == pytest.approx(sweep.slope, abs=1e-3)
    assert smallest.change + 4 * smallest.change_error < 0
    assert smallest.lowered == pytest.approx(sweep.downhill, abs=0.002)
    assert largest.change > 0  # far too large a step


def test_without_t_every_small_step_goes_down_and_with_t_most_do():
    identity, spread = (step_random_jacobians(s, ALPHAS, trials=2000) for s in (1.0, 1e4))
    assert identity.downhill == identity.steps[0].lowered == 1
    assert 0.8 < spread.downhill < 1


def test_random_positive_has_mean_one_and_the_spread_asked_for():
    diagonal = random_positive((100_000,), 100.0, torch.Generator().manual_seed(0))
    assert diagonal.mean().item() == pytest.approx(1, abs=0.02)
    assert 95 < (diagonal.max() / diagonal.min()).item() <= 100


def test_log_cosh_is_itself_and_does_not_overflow():
    sigma = torch.tensor([[-0.7, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    value = log_cosh(sigma)
    torch.testing.assert_close(value, sigma.cosh().log().sum(-1))
    (gradient,) = torch.autograd.grad(value.sum(), sigma)
    torch.testing.assert_close(gradient, sigma.tanh())
    assert log_cosh(torch.tensor([[1e4]])).item() == pytest.approx(1e4 - math.log(2))


def test_summary_of_two_trials():
    changes = torch.tensor([[-1.0, 0.5]], dtype=torch.float64)
    form = torch.tensor([2.0, -1.0], dtype=torch.float64)
    sweep = summarize("T", "here", [0.5], changes=changes, form=form, corollary=torch.ones(2))
    (step,) = sweep.steps
    assert (sweep.downhill, sweep.slope) == (0.5, 0.5)
    assert (step.lowered, step.change, step.ratio) == (0.5, -0.25, 0.5)
    assert step.lowered_error == pytest.approx(0.5 / math.sqrt(2))
    assert step.change_error == pytest.approx(0.75)


def test_ratio_of_proportional_numbers_has_no_error():
    x = torch.tensor([1.0, 2.0, 4.0])
    assert ratio_of_means(3 * x, x) == (3, 0)


def test_corollary_is_exact_for_one_layer_and_one_sample():
    """Then M M' = (|x|^2 + 1) I, and the lemma's c0 I is no approximation."""
    generator = torch.Generator().manual_seed(0)
    network = random_mlp((), generator)
    x, y = (tensor[:1] for tensor in random_task(Labels.RANDOM, generator))
    sigma = network(x)
    loss = cross_entropy(sigma, y)
    (g,) = torch.autograd.grad(loss, sigma, retain_graph=True)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    expected = sum(gradient.square().sum().item() for gradient in gradients)
    products = {"0.weight": g.square().sum().item()}
    assert corollary_in(network, x, products) == pytest.approx(expected)


@pytest.mark.parametrize("labels", Labels)
def test_small_steps_of_networks_lower_the_loss(labels):
    sweeps = {sweep.label: sweep for sweep in step_networks(labels, ALPHAS, networks=6)}
    assert list(sweeps) == ["identity", "RMS", "Sign"]
    for sweep in sweeps.values():
        assert sweep.steps[0].ratio == pytest.approx(sweep.slope, rel=0.01)
        assert sweep.steps[0].change < 0
    # RMS shares r over the samples: the gradient with rows rescaled, always downhill.
    assert sweeps["identity"].downhill == sweeps["RMS"].downhill == 1


def test_learnable_labels_give_more_than_the_corollary():
    random, learnable = (step_networks(labels, ALPHAS, networks=12) for labels in Labels)
    for a, b in zip(random, learnable, strict=True):
        assert b.slope > 1.3 * a.slope
