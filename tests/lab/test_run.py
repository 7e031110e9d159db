"""One training step against a step written by hand; evaluation, record and saved state."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_lab import TINY, TINY_COLOURS, tiny_colours, tiny_data

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.batches import evaluation_set
from virtualgrad.lab.recipes import Tuned
from virtualgrad.lab.run import Run, Setup

CPU = Setup(torch.device("cpu"))


def a_run(optimizer="sgd", *, recipe=TINY, seed=0, setup=CPU):
    run = Run(recipe, optimizer, seed, tiny_data(), setup)
    run.batches.seek(0)
    return run


def parameters(run):
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def test_a_step_of_sgd_with_the_penalty_inside_the_loss():
    """Only linear layers are penalized: their weights and biases, not batch norm."""
    recipe = replace(TINY, l1=0.05)
    run, twin = a_run(recipe=recipe), a_run(recipe=recipe)
    x, y = twin.batches.next()
    linear = [*twin.model[0].parameters(), *twin.model[3].parameters()]
    loss = F.cross_entropy(twin.model(x), y) + 0.05 * sum(w.abs().sum() for w in linear)
    loss.backward()
    expected = [p.detach() - 0.1 * p.grad for p in twin.model.parameters()]
    run.train_step()
    torch.testing.assert_close(parameters(run), expected, rtol=1e-6, atol=1e-7)
    assert not any(torch.equal(a, b) for a, b in zip(expected, parameters(twin), strict=True))


@pytest.mark.parametrize("optimizer", TINY.optimizers)
def test_the_penalty_reaches_the_weights_untransformed(optimizer):
    """Its part of the gradient is l1 sign(w), whatever T does to the rest."""
    gradients = []
    for l1 in (0.0, 0.25):
        run = a_run(optimizer, recipe=replace(TINY, l1=l1))
        torch.nn.init.ones_(run.model[3].bias)
        signs = [p.detach().sign() for p in run.penalized]
        run.train_step()
        gradients.append([p.grad.clone() for p in run.penalized])
    for plain, penalized, sign in zip(*gradients, signs, strict=True):
        torch.testing.assert_close(penalized - plain, 0.25 * sign, rtol=1e-5, atol=1e-5)


def test_learning_rates_change_at_milestones():
    run = a_run("svgd", recipe=replace(TINY, milestones=(25,)))
    for step, lr in ((0, 0.05), (24, 0.05), (25, 0.02), (39, 0.02)):
        run.step = step
        run.set_learning_rate()
        assert {group["lr"] for group in run.optimizer.param_groups} == {lr}


def test_seeds_decide_the_initial_weights():
    one, same, other = (parameters(a_run(seed=seed)) for seed in (0, 0, 1))
    assert all(map(torch.equal, one, same))
    assert not torch.equal(one[0], other[0])


def test_evaluation_by_hand():
    run, data = a_run(), tiny_data()
    losses = []
    for _ in range(3):
        before = parameters(run)
        x, y = run.batches.next()
        run.batches.position -= 8
        losses.append(F.cross_entropy(run.model(x), y).item())
        run.train_step()
        assert not torch.equal(before[0], parameters(run)[0])
    run.advance(3)
    held_out = evaluation_set(data, CPU.device, 20, False)
    run.look(held_out)
    run.note(held_out)
    logits = torch.cat([run.model(part) for part in (data.test_images / 255).reshape(2, 20, 16)])
    wrong = (logits.argmax(1) != data.test_labels).sum().item()
    curve = run.record.curve
    assert curve.step == [3]
    assert curve.train_loss == [pytest.approx(sum(losses) / 3)]
    assert curve.test_loss == [pytest.approx(F.cross_entropy(logits, data.test_labels).item())]
    assert curve.test_error == [pytest.approx(100 * wrong / 40)]
    held_out = evaluation_set(data, CPU.device, 20, False)
    run.look(held_out)
    run.note(held_out)
    assert curve.train_loss[-1] == 0  # no step since the last look


@pytest.mark.parametrize("optimizer", TINY.optimizers)
@pytest.mark.parametrize("at", [0, 2])
def test_a_saved_state_goes_on_bit_by_bit(optimizer, at):
    run, later = a_run(optimizer), a_run(optimizer)
    for step in range(4):
        if step == at:
            saved = run.state_dict()
            later.load_state_dict(torch.load(_bytes(saved), weights_only=True))
            later.batches.seek(at)
        run.train_step()
        run.advance(1)
    for _ in range(4 - at):
        later.train_step()
        later.advance(1)
    held_out = evaluation_set(tiny_data(), CPU.device, 20, False)
    for each in (run, later):
        each.look(held_out)
        each.note(held_out)
    assert all(map(torch.equal, parameters(run), parameters(later)))
    assert run.record.curve == later.record.curve and later.step == 4


def _bytes(state):
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_the_record_says_what_was_set():
    recipe = replace(TINY, optimizers={"mine": Tuned("sgd", (0.1, 0.05), {"maximize": False})})
    record = a_run("mine", recipe=recipe, seed=7).record
    assert (record.recipe, record.optimizer, record.seed) == ("tiny", "mine", 7)
    assert record.settings["maximize"] is False and record.settings["lr"] == [0.1, 0.05]
    assert record.data == {"name": "tiny", "source": "made up for tests"}
    assert not record.finished


def test_functions_are_recorded_by_name_and_finishing_completes_the_record():
    recipe = replace(TINY, optimizers={"x": Tuned("sgd", (0.1, 0.05), {"momentum": 0.5})})
    run = a_run("x", recipe=recipe)
    run.train_step()
    run.finish()
    count = sum(p.numel() for p in run.model.parameters())
    assert run.record.finished and run.record.state_bytes == 4 * count


def test_channels_last():
    setup = Setup(torch.device("cpu"), channels_last=True)
    run = Run(TINY_COLOURS, "svgd", 0, tiny_colours(), setup)
    run.batches.seek(0)
    kernel = run.model[0].weight
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    before = kernel.detach().clone()
    run.train_step()
    assert kernel.dtype == torch.float32 and not torch.equal(before, kernel)


@pytest.mark.parametrize("amp", [False, True])
def test_amp_is_autocast_to_bfloat16_in_the_forward_only(amp):
    """Looked at, not run: not every CPU that promises bfloat16 instructions has them."""
    run = a_run(setup=Setup(torch.device("cpu"), amp=amp))
    seen = []

    class Look(torch.nn.Module):
        def forward(self, x):
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return x.bfloat16()

    run.model = Look()
    assert run._forward(torch.ones(2, 2)).dtype == torch.float32
    assert seen == [(amp, torch.bfloat16)] and not torch.is_autocast_enabled("cpu")


def test_an_unknown_method_is_named():
    recipe = replace(TINY, optimizers={"mine": Tuned("magic", (0.1, 0.1))})
    with pytest.raises(HyperparameterError, match=r"'magic' for mine.*svgd"):
        a_run("mine", recipe=recipe)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("optimizer", ["sgd", "svgd"])
def test_a_compiled_run_trains_as_an_eager_one(optimizer):
    compiled = a_run(optimizer, setup=replace(CPU, compiled=True))
    eager = a_run(optimizer)
    for _ in range(3):
        compiled.train_step()
        eager.train_step()
    torch.testing.assert_close(parameters(compiled), parameters(eager), rtol=1e-5, atol=1e-6)
    assert compiled.record.settings["compiled"]
    assert "compiled" not in eager.record.settings
