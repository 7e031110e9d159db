"""The training loop: where it stops, what it calls, and that training works."""

from dataclasses import replace

import pytest
import torch
from tiny_lab import TINY, tiny_data

from virtualgrad.lab import engine as module
from virtualgrad.lab.batches import evaluation_set
from virtualgrad.lab.engine import Engine
from virtualgrad.lab.run import Run, Setup

CPU = torch.device("cpu")


def a_run(optimizer="sgd", *, recipe=TINY, seed=0, device=CPU):
    return Run(recipe, optimizer, seed, tiny_data(), Setup(device))


def train(runs, on_progress=lambda: None):
    evaluations = []
    held_out = evaluation_set(tiny_data(), runs[0].setup.device, 20, False)
    engine = Engine(runs)
    engine.train(held_out, lambda: evaluations.append(runs[0].step), on_progress)
    return engine, evaluations


@pytest.mark.parametrize(
    ("step", "next_event"),
    [
        (0, 10),  # evaluation
        (9, 10),
        (10, 11),  # 90 images in batches of 8: an epoch has 11 steps
        (11, 20),
        (22, 25),  # the milestone
        (25, 30),
        (33, 37),  # the end
    ],
)
def test_stretches_end_at_the_next_event(step, next_event):
    engine = Engine([a_run(recipe=replace(TINY, steps=37))])
    assert step + engine._until_next_event(step) == next_event


def test_evaluations_lie_where_the_recipe_says_and_at_the_end():
    runs = [a_run(recipe=replace(TINY, steps=37))]
    engine, evaluations = train(runs)
    assert evaluations == runs[0].record.curve.step == [10, 20, 30, 37]
    assert engine.steps == runs[0].step == 37
    assert runs[0].record.ms_per_step == pytest.approx(1e3 * engine.seconds / 37)


def test_milestones_beyond_the_last_step_do_no_harm():
    _, evaluations = train([a_run(recipe=replace(TINY, steps=5))])
    assert evaluations == [5]


@pytest.mark.parametrize("optimizer", TINY.optimizers)
def test_training_lowers_error_and_loss(optimizer):
    run = a_run(optimizer, recipe=replace(TINY, steps=150, milestones=(100,)))
    train([run])
    curve = run.record.curve
    assert curve.test_error[0] > 10 and run.record.final_error < curve.test_error[0] / 2
    assert curve.train_loss[-1] < curve.train_loss[0] / 2


def test_the_loop_equals_steps_by_hand_in_any_stretches(monkeypatch):
    """Learning rates, epochs and order of samples do not depend on how the loop is cut up."""
    by_hand = a_run("svgd")
    for step in range(TINY.steps):
        by_hand.step = step
        by_hand.set_learning_rate()
        by_hand.batches.seek(step)
        by_hand.train_step()
    for seconds in (0.0, 1e9):  # one step at a time; whole stretches
        monkeypatch.setattr(module, "SECONDS_UNWATCHED", seconds)
        seen = []
        run = a_run("svgd")
        train([run], lambda run=run, seen=seen: seen.append(run.step))
        assert seen == (list(range(1, 41)) if seconds == 0 else [10, 11, 20, 22, 25, 30, 33, 40])
        assert all(map(torch.equal, run.model.parameters(), by_hand.model.parameters()))


def test_runs_side_by_side_equal_runs_alone():
    together = [a_run("svgd", seed=seed) for seed in (0, 1)]
    train(together)
    for run in together:
        alone = a_run("svgd", seed=run.record.seed)
        train([alone])
        assert alone.record.curve == run.record.curve
        assert all(map(torch.equal, run.model.parameters(), alone.model.parameters()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", TINY.optimizers)
def test_graphed_runs_equal_eager_steps(optimizer):
    cuda = torch.device("cuda")
    graphed = [a_run(optimizer, seed=seed, device=cuda) for seed in (0, 1)]
    train(graphed)
    for run in graphed:
        eager = a_run(optimizer, seed=run.record.seed, device=cuda)
        for step in range(TINY.steps):
            eager.step = step
            eager.set_learning_rate()
            eager.batches.seek(step)
            eager.train_step()
        torch.testing.assert_close(
            list(run.model.parameters()), list(eager.model.parameters()), rtol=1e-3, atol=1e-4
        )
        assert run.record.curve.step == [10, 20, 30, 40]
