"""Grouping by recipe and optimizer: what counts, what is open, what is refused."""

import math
from dataclasses import replace

import pytest

from virtualgrad.lab.record import Curve, RecordError
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.spread import Spread


def test_mean_and_deviation_over_seeds_in_closed_form(make):
    runs = [make(seed=seed, lowest=1.6 + 0.1 * seed, last=2.0 + 0.2 * seed) for seed in (2, 0, 1)]
    (section,) = gather(runs)
    cell = section.cell("svgd")
    assert [run.seed for run in cell.runs] == [0, 1, 2]
    # Three equally spaced values a, a + d, a + 2d have mean a + d and sample deviation d.
    assert cell.lowest.values == pytest.approx((1.6, 1.7, 1.8))
    assert (cell.lowest.mean, cell.lowest.sd) == pytest.approx((1.7, 0.1))
    assert (cell.final.mean, cell.final.sd) == pytest.approx((2.2, 0.2))


def test_one_measurement_has_no_deviation():
    assert Spread((1.6,)).sd is None
    assert Spread((1.6,)).error_of_difference(Spread((1.0, 2.0))) is None


def test_standard_error_of_a_difference():
    # Deviations 1 and 2 over three and three values: sqrt(1/3 + 4/3).
    assert Spread((0.0, 1.0, 2.0)).error_of_difference(Spread((0.0, 2.0, 4.0))) == pytest.approx(
        math.sqrt(5 / 3)
    )


def test_order_is_the_papers(paper_runs):
    sections = gather(paper_runs[::-1])
    assert [section.name for section in sections] == ["mlp", "vgg", "resnet20"]
    assert sections[0].optimizers == ("rmsprop", "adam", "sgd", "svgd")


def test_own_recipes_and_optimizers_come_last_and_need_no_paper(make):
    own = replace(make(), optimizer="mine")
    elsewhere = replace(make(), recipe="my-recipe")
    mlp, mine = gather([elsewhere, own, make()])
    assert mlp.optimizers == ("rmsprop", "adam", "sgd", "svgd", "mine")
    assert (mine.title, dict(mine.paper), mine.optimizers) == ("my-recipe", {}, ("svgd",))


def test_unfinished_and_missing_runs_are_listed_and_do_not_count(make):
    half = make(optimizer="svgd", seed=1, lowest=0.1, finished=False)
    half.curve = Curve([600], [1.0], [1.0], [0.1])
    unstarted = make(optimizer="sgd", seed=0, finished=False, curve=Curve())
    (section,) = gather([make(seed=0), half, unstarted])
    assert section.cell("svgd").lowest.values == (1.6,)
    assert section.cell("sgd") is None
    assert section.open_runs == (
        "RMSProp, seeds 0, 1: missing",
        "Adam, seeds 0, 1: missing",
        "SGD, seed 0: unfinished, at step 0",
        "SGD, seed 1: missing",
        "SVGD, seed 1: unfinished, at step 600",
    )


def test_comparable_with_the_paper_only_on_its_data_and_with_its_steps(make, digits):
    assert gather([make()])[0].caveats == ()
    (section,) = gather([make(data=digits)])
    assert section.on_digits
    assert section.title == "MLP on MNIST: run on digits (embedded) instead"
    assert section.caveats == ("the data is digits (embedded), not the paper's",)
    short = make()
    short.curve = Curve([60], [1.0], [1.0], [5.0])
    assert gather([short])[0].caveats == ("the runs took 60 steps, the paper's 6,000",)


def test_different_settings_are_refused_with_both_files_and_the_difference(make):
    one, other = make(seed=0), make(seed=1)
    other.settings["amp"] = True
    with pytest.raises(
        RecordError,
        match=r"mlp-svgd-seed0\.json and mlp-svgd-seed1\.json, which differ: amp is False and True",
    ):
        gather([one, other])


def test_unfinished_runs_may_have_other_settings(make):
    other = make(seed=1, finished=False)
    other.settings["amp"] = True
    assert len(gather([make(seed=0), other])[0].runs) == 1


@pytest.mark.parametrize("what", ["data", "milestones", "length"])
def test_optimizers_of_one_table_must_have_had_the_same_conditions(make, digits, what):
    other = make(optimizer="sgd")
    if what == "data":
        other.data = digits
    elif what == "milestones":
        other.settings["milestones"] = [1, 2]
    else:
        other.curve = Curve([60], [1.0], [1.0], [5.0])
    with pytest.raises(RecordError, match=r"mlp-svgd-seed0\.json and mlp-sgd-seed0\.json"):
        gather([make(), other])


def test_one_run_twice_is_refused(make):
    with pytest.raises(RecordError, match=r"two files that both record the run mlp-svgd-seed0"):
        gather([make(), make()])


@pytest.mark.parametrize(
    "curve",
    [
        Curve(),
        Curve([1, 2], [1.0, 1.0], [1.0, 1.0], [2.0]),
        Curve([1], [1.0], [1.0], [math.nan]),
        Curve([1], [1.0], [1.0], ["2"]),  # type: ignore[list-item]
    ],
    ids=["empty", "torn", "not a number", "text"],
)
def test_damaged_curves_are_named(make, curve):
    with pytest.raises(RecordError, match=r"mlp-svgd-seed0\.json, finished but with a damaged"):
        gather([make(curve=curve)])


def test_no_finished_run_says_how_to_finish_them(make):
    with pytest.raises(RecordError, match=r"no finished run.*--resume"):
        gather([make(finished=False)])
