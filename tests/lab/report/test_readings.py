"""Readings of SVGD: changes seed by seed in closed form, and what is said of them."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.report import print_table, write_report
from virtualgrad.lab.report.differences import beyond_noise, paired
from virtualgrad.lab.report.markdown import markdown, readme_blocks
from virtualgrad.lab.report.page import page
from virtualgrad.lab.report.readings import readings_table, readings_verdict
from virtualgrad.lab.report.sections import Cell, gather
from virtualgrad.lab.report.spread import T_95, Spread


def readings(make, recipe="mlp", **ends):
    """Last errors of readings, one per seed; the lowest is 0.1 less."""
    return [
        make(recipe, name.replace("_", "-"), seed, last=end, lowest=end - 0.1)
        for name, values in ends.items()
        for seed, end in enumerate(values)
    ]


def rows_of(records):
    (section,) = gather(records)
    return {row.label: [str(e) for e in row.entries] for row in readings_table(section).rows}


def texts(records):
    (section,) = gather(records)
    return [finding.text for finding in readings_verdict(section)]


def test_a_change_is_taken_seed_by_seed(make):
    # Changes 0.1, 0.2, 0.3: mean 0.2, sample deviation 0.1, standard error 0.1 / sqrt(3) = 0.058.
    runs = readings(make, released=(1.0, 2.0, 3.0), updated_first=(1.1, 2.2, 3.3))
    rows = rows_of(runs)
    assert rows["released"] == ["2.00 ± 1.00", "–", "1.90 ± 1.00", "–", "0.250", "384"]
    assert rows["r updated first"] == [
        "2.20 ± 1.10", "+0.20 ± 0.06", "2.10 ± 1.10", "+0.20 ± 0.06", "0.250", "384"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("time", "text"),
    [(0.0853, "0.0853"), (1.333, "1.33"), (123.4, "123"), (4030.0, "4,030"), (None, "–")],
)
def test_times(make, time, text):
    assert rows_of([make("mlp", "released", ms_per_step=time)])["released"][4] == text


def test_only_seeds_that_both_have_are_paired(make):
    base = Cell("released", tuple(make("mlp", "released", seed, last=1.0) for seed in (0, 1, 2)))
    other = Cell("x", tuple(make("mlp", "per-sample", seed, last=1.0 + seed) for seed in (1, 2, 5)))
    found = paired(other, base, lambda run: run.final_error)
    assert found is not None and found.values == (1.0, 2.0)
    alone = Cell("x", (make("mlp", "per-sample", 7),))
    assert paired(alone, base, lambda run: run.final_error) is None
    records = [*base.runs, *alone.runs]
    assert rows_of(records)["per sample"][1] == "–"
    assert texts(records)[0].startswith("Too few seeds in common")


def test_standard_error_and_interval():
    # 1, 2, 3: deviation 1, error 1 / sqrt(3), 2 degrees of freedom.
    spread = Spread((1.0, 2.0, 3.0))
    assert spread.standard_error == pytest.approx(1 / math.sqrt(3))
    assert spread.interval == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert Spread((1.0,)).standard_error is None and Spread((1.0,)).interval is None
    many = Spread(tuple(float(i % 2) for i in range(100)))
    assert many.interval == pytest.approx((0.5 - 2.228 * many.sd / 10, 0.5 + 2.228 * many.sd / 10))


def test_students_t_in_closed_form():
    """The distribution function for 1, 2 and 4 degrees of freedom is elementary."""
    one, two, _, four = T_95[:4]
    assert 0.5 + math.atan(one) / math.pi == pytest.approx(0.975, abs=2e-5)
    assert 0.5 + two / (2 * math.sqrt(2 + two**2)) == pytest.approx(0.975, abs=2e-5)
    u = 1 + four**2 / 4
    assert 0.5 + 3 / 8 * four / math.sqrt(u) * (1 - four**2 / (12 * u)) == pytest.approx(
        0.975, abs=2e-5
    )
    assert list(T_95) == sorted(T_95, reverse=True) and T_95[-1] > 1.96


@pytest.mark.parametrize(
    ("values", "beyond"),
    [
        ((0.1, 0.2, 0.3), False),  # 0.2 < 4.303 * 0.058
        ((0.2, 0.25, 0.3), True),  # 0.25 > 4.303 * 0.029
        ((-0.2, -0.25, -0.3), True),
        ((0.0, 0.0), False),
        ((0.5,), False),
    ],
)
def test_noise(values, beyond):
    assert beyond_noise(Spread(values)) is beyond
    assert beyond_noise(None) is False


def test_what_is_said(make):
    runs = readings(
        make,
        released=(2.0, 2.1, 2.2),
        updated_first=(1.8, 1.85, 1.9),
        per_sample=(2.1, 2.0, 2.2),
        per_sample_as_printed=(4.2, 4.35, 4.5),
        every_linear_op=(2.5,),
    )
    assert texts(runs) == [
        "Higher last error than the released reading: per sample, ε as printed (+2.25 ± 0.03).",
        "Lower last error than the released reading: r updated first (−0.25 ± 0.03).",
        "Not to be told from the released reading with these seeds: per sample (+0.00 ± 0.06).",
        "Too few seeds in common with the released reading to tell: every linear op (+0.50 ± –).",
        "Left out: r shared over positions; an MLP has no positions, so it would be the released "
        "reading.",
    ]


def test_without_the_released_reading(make):
    runs = readings(make, "resnet20", updated_first=(9.0, 9.1))
    assert texts(runs) == ["The released reading has no finished run: nothing to compare with."]
    assert rows_of(runs)["r updated first"][1] == "–"


def test_missing_readings_are_listed(make):
    (section,) = gather(readings(make, released=(2.0, 2.1), updated_first=(2.0,)))
    assert section.open_runs[:2] == (
        "r updated first, seed 1: missing",
        "per sample, seeds 0, 1: missing",
    )
    assert not any("positions" in line for line in section.open_runs)
    (section,) = gather(readings(make, "resnet20", released=(9.0,)))
    assert "r shared over positions, seed 0: missing" in section.open_runs


def test_readings_are_a_section_of_their_own(make):
    mixed = [make("mlp", "svgd"), *readings(make, released=(1.7,)), make("vgg", "sgd")]
    sections = gather(mixed)
    assert [(s.name, s.recipe, s.of_readings) for s in sections] == [
        ("mlp", "mlp", False),
        ("vgg", "vgg", False),
        ("mlp-readings", "mlp", True),
    ]
    assert sections[0].optimizers == ("rmsprop", "adam", "sgd", "svgd")
    assert sections[2].title == "Readings of SVGD, MLP on MNIST" and sections[2].paper == {}


def test_each_kind_has_its_place_in_the_readme(make):
    paper, own = [make("mlp", "svgd")], readings(make, released=(1.7,))
    assert readme_blocks(gather([*paper, *own]), "") == {
        "tables": markdown(gather(paper)),
        "readings": markdown(gather(own)),
    }
    assert list(readme_blocks(gather(own), "")) == ["readings"]


def test_markdown(make):
    runs = readings(make, released=(2.0, 2.1, 2.2), per_sample_as_printed=(4.2, 4.35, 4.5))
    lines = markdown(gather(runs)).splitlines()
    assert lines[:6] == [
        "### Readings of SVGD, MLP on MNIST",
        "",
        "|  | last error, % | change | lowest error, % | change | ms | r |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| released | 2.10 ± 0.10 | – | 2.00 ± 0.10 | – | 0.250 | 384 |",
        "| per sample, ε as printed | 4.35 ± 0.15 | **+2.25 ± 0.03** | 4.25 ± 0.15 | "
        "**+2.25 ± 0.03** | 0.250 | 384 |",
    ]
    assert "Student's t" in lines[-1]


@pytest.mark.parametrize("end", [9.5, 19.5])
def test_terminal_table_fits_eighty_columns(make, end):
    everything = {name.replace("-", "_"): (end, end + 1.1) for name in READ_BY_RESNET}
    stream = io.StringIO()
    runs = readings(make, "resnet20", **everything)
    for run in runs:
        run.state_bytes = 4 * 188_426
    print_table(runs, Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in stream.getvalue()
    assert sum(line.rstrip().endswith("188,426") for line in lines) == 7


READ_BY_RESNET = (
    "released",
    "updated-first",
    "per-sample",
    "per-sample-as-printed",
    "every-linear-op",
    "shared-positions",
    "algorithm-1",
)


def test_page_of_readings_alone_and_with_the_paper(make):
    runs = readings(make, released=(1.7, 1.8), updated_first=(1.6, 1.9))
    alone = page(gather(runs))
    assert "<h1>Readings of SVGD, compared</h1>" in alone and 'id="mlp-readings"' in alone
    assert "No finished run in this folder" not in alone and "α is the learning" not in alone
    assert '<p class="note">' in alone and "× released" in alone
    both = page(gather([*runs, make("mlp", "svgd")]))
    assert "<h1>The paper&#39;s experiments, run again</h1>" in both
    assert 'id="mlp"' in both and 'id="mlp-readings"' in both
    assert "No finished run in this folder: VGG on CIFAR-10, ResNet-20 on CIFAR-10." in both


def test_files(make, saved, tmp_path):
    runs = [*readings(make, released=(1.7,), updated_first=(1.6,)), make("mlp", "svgd")]
    write_report(saved(runs, tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"error-mlp.png", "error-mlp-readings.png", "cost-mlp-readings.svg"} <= names
    assert "mlp-updated-first-seed0.json" in names
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["mlp"]
    assert list(summary["mlp"]) == ["svgd", "released", "updated-first"]
    assert summary["mlp"]["updated-first"]["final"] == [1.6]


def test_a_recipe_of_ones_own_may_have_readings(make):
    (section,) = gather([replace(make("mlp", "released"), recipe="mine")])
    assert section.title == "Readings of SVGD, mine" and "mine" not in RECIPES
