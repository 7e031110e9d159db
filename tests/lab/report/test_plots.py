"""Bands in closed form, scales that show the late differences, and files that do not change."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from virtualgrad.lab.record import Curve
from virtualgrad.lab.report.bands import Band, band, limits, near_best
from virtualgrad.lab.report.bars import byte_count, step_times
from virtualgrad.lab.report.colors import OTHERS, VARIABLES, color_of
from virtualgrad.lab.report.curves import end_of_run, whole_run
from virtualgrad.lab.report.drawing import as_files
from virtualgrad.lab.report.plots import plots_of
from virtualgrad.lab.report.sections import gather


def drawn(panel, *arguments):
    axes = Figure().subplots()
    panel(*arguments, axes)
    return axes


def test_band_over_three_seeds(make):
    runs = []
    for seed in range(3):
        run = make(seed=seed)
        run.curve = Curve([1, 2], [1.0, 1.0], [1.0, math.inf], [2.0 + seed, 5.0])
        runs.append(run)
    (section,) = gather(runs)
    error = band(section.cells[0], "test_error")
    assert error.mean.tolist() == [3.0, 5.0]
    assert error.sd.tolist() == [1.0, 0.0]
    assert (error.low.tolist(), error.high.tolist()) == ([2.0, 5.0], [4.0, 5.0])
    assert np.isnan(band(section.cells[0], "test_loss").mean[1])
    assert limits([error, band(section.cells[0], "test_loss")]) == (1.0, 5.0)


def test_limits_of_nothing():
    assert limits([]) == (0.0, 1.0)


def test_an_end_far_from_the_best_is_told_apart():
    def ending(value):
        return Band(np.array([1.0]), np.array([value]), np.array([0.0]))

    bands = {"a": ending(2.0), "b": ending(4.9), "c": ending(90.0), "d": ending(math.nan)}
    assert list(near_best(bands, 2.0, 1.0)) == ["a", "b"]
    assert list(near_best({"d": bands["d"]}, 2.0, 1.0)) == []


def test_scale_of_the_whole_run_is_logarithmic_and_leaves_the_diverged_out(make):
    runs = [make(optimizer="svgd", lowest=1.6), make(optimizer="sgd", lowest=90.0)]
    axes = drawn(whole_run, gather(runs)[0], "test_error")
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[1] < 10
    assert axes.get_title(loc="right") == "out of view: SGD"


def test_end_of_the_run_shows_the_paper_and_begins_behind_the_last_change(make):
    runs = [make(optimizer="svgd", lowest=1.7), make(optimizer="sgd", lowest=1.8)]
    axes = drawn(end_of_run, gather(runs)[0])
    low, high = axes.get_ylim()
    assert low < 1.6 and 1.8 < high < 4
    assert axes.get_xlim() == (4200, 6000)
    marks = {line.get_ydata()[0] for line in axes.lines if line.get_marker() == "<"}
    assert marks == {1.60, 1.76}


def test_no_paper_marks_on_digits(make, digits):
    axes = drawn(end_of_run, gather([make(data=digits)])[0])
    assert not any(line.get_marker() == "<" for line in axes.lines)


def test_learning_rate_changes_are_marked(make):
    axes = drawn(whole_run, gather([make()])[0], "train_loss")
    vertical = [line for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert [line.get_xdata()[0] for line in vertical] == [1600, 3600]


@pytest.mark.parametrize(
    "curve",
    [
        Curve([100], [1.0], [1.0], [50.0]),
        Curve([100, 200], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        Curve([0, 1700], [0.0, 1.0], [2.3, 1.0], [90.0, 3.0]),
        Curve([100, 200], [math.nan] * 2, [math.inf] * 2, [90.2, 90.2]),
    ],
    ids=["one evaluation", "zero", "just behind a change", "diverged"],
)
def test_odd_curves_are_drawn_without_a_warning(make, curve):
    record = make()
    record.curve = curve
    for plot in plots_of(gather([record])[0]):
        png, svg = as_files(plot)
        assert png.startswith(b"\x89PNG") and "</svg>" in svg


def test_captions_tell_how_many_seeds_and_what_hardware(make):
    runs = [make(seed=0), make(seed=1), make(optimizer="sgd")]
    runs[1].environment["device"] = "x86_64"
    error, _, cost = plots_of(gather(runs)[0])
    assert error.caption.startswith("Lines are means over 1–2 seeds")
    assert cost.caption.endswith("different hardware: NVIDIA H200, x86_64.")
    assert plots_of(gather(runs[:1])[0])[0].caption.startswith("Each line is a single run")


def test_time_bars_give_the_ratio_to_sgd(make):
    runs = [
        make(optimizer="sgd", ms_per_step=0.2),
        make(optimizer="svgd", ms_per_step=0.3),
        make(optimizer="adam", ms_per_step=None),
    ]
    axes = drawn(step_times, gather(runs)[0])
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["not measured", "0.200 ms", "0.300 ms  (1.50 × SGD)"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (5 * 2**20, "5 MiB"),
        (3 * 2**30, "3 GiB"),
    ],
)
def test_bytes_with_units(size, text):
    assert byte_count(size) == text


def test_every_optimizer_has_a_colour_that_the_page_knows():
    names = ("rmsprop", "adam", "sgd", "svgd", *"abcdefg")
    colors = [color_of(name, names) for name in names]
    assert len(set(colors)) == 4 + len(OTHERS)
    assert set(colors) <= VARIABLES.keys()
