"""`virtualgrad suggest` as a user meets it, on a network so small that all of it takes a moment."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_lab import TINY, tiny_data
from typer.testing import CliRunner

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab import cli
from virtualgrad.lab.recipes import RECIPES, Tuned
from virtualgrad.lab.record import RecordError, load_records
from virtualgrad.lab.report.markdown import written
from virtualgrad.lab.report.readme import marks
from virtualgrad.lab.run import Setup
from virtualgrad.lab.settings.files import best_of_sweep, columns_of, load_kept
from virtualgrad.lab.settings.table import contents_of
from virtualgrad.lab.settings.ways import OWN, SWEPT, WAYS, Found, find_settings

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "settings"
CPU = Setup(torch.device("cpu"))


@pytest.fixture(autouse=True)
def tiny_recipe(monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", TINY)


def run(*arguments):
    return CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )


def a_sweep(folder, **changes):
    best = {"settings": {"lr": 0.3, "scale": 0.0123456}, "lr": [0.3, 0.12], "errors": [9.0, 11.0]}
    summary = {
        "recipe": "tiny",
        "seeds": 2,
        "steps": 40,
        "amp": False,
        "optimizers": {"svgd": {"best": best, "trials": [{}] * 7}},
    }
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    return folder


def test_the_rules_are_applied_to_the_rates_of_the_table():
    found = {each.way: each.tuned for each in find_settings(TINY, tiny_data(), CPU)}
    assert list(found) == [way for way in WAYS if way != SWEPT]
    assert found[OWN] == TINY.optimizers["svgd"]
    assert found["rules"].lr == (0.1, 0.05)  # SGD's phases
    assert found["rules"].options == {"scale": 0.1}  # 0.01 / 0.1
    assert found["rule-sgd"].options == {"scale": 0.02}
    assert found["suggest-sgd"].lr == (0.1, 0.05)
    adam = found["suggest-adam"]
    assert adam.lr[1] / adam.lr[0] == pytest.approx(0.5)


def test_a_whole_comparison(tmp_path):
    out, page = tmp_path / "out", tmp_path / "page.md"
    begin, end = marks("suggestions")
    page.write_text(f"before\n{begin}\n{end}\nafter\n", encoding="utf-8")
    arguments = ("suggest", "tiny", "--seeds", 2, "--out", out, "--sweep", a_sweep(tmp_path / "s"))
    result = run(*arguments, "--page", page)
    assert result.exit_code == 0, result.output
    (kept,) = load_kept(out)
    assert [each.way for each in kept.found] == list(WAYS)
    swept = kept.found[-1].tuned
    assert (swept.lr, swept.options) == ((0.3, 0.12), {"scale": 0.01235})
    assert kept.sweep is not None and kept.sweep["trials"] == 7
    records = load_records(out)
    assert len(records) == 2 * len(set(kept.columns.values()))
    assert all(record.finished and record.settings["steps"] == 40 for record in records)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{begin}") and text.endswith(f"{end}\nafter\n")
    tables = (out / "tables.md").read_text(encoding="utf-8")
    assert tables.strip() in text
    (row,) = [line for line in tables.splitlines() if line.startswith(f"| {WAYS['rules']} ")]
    errors = [run.final_error for run in records if run.optimizer == "rules"]
    assert f"| 0.1 | 0.1 | 0.01 | {sum(errors) / 2:.2f} ±" in row.replace("**", "")
    assert "The sweep had 7 trials of SVGD, 2 seeds each." in tables
    saved = json.loads((out / "tiny-settings.json").read_text())
    assert saved["ways"]["suggest-sgd"]["reasons"] and saved["ways"]["suggest-sgd"]["sizes"]

    again = run(*arguments, "--resume")  # trains nothing
    assert again.exit_code == 0 and "finished before" in again.output
    assert (out / "tables.md").read_text(encoding="utf-8") == tables
    shown = run("suggest", "--table", "--out", out)
    assert shown.exit_code == 0 and "Tiny, settings that were not searched" in shown.output
    assert (out / "tables.md").read_text(encoding="utf-8") == tables


def test_one_seed_tells_no_deviation_and_no_likeness(tmp_path):
    result = run("suggest", "tiny", "--seeds", 1, "--ways", f"{OWN},rules", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    tables = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert "Errors are those of one seed" in tables and "nan" not in tables
    assert f"Too few seeds in common with {WAYS[OWN]} to tell: {WAYS['rules']} (" in tables
    assert not [claim for claim in ("mean ±", "Student", "Not to be told") if claim in tables]


def test_some_ways_at_a_time_and_what_was_known_stays(tmp_path):
    out = ("--seeds", 1, "--out", tmp_path / "out")
    first = run("suggest", "tiny", "--ways", "own", "--sweep", a_sweep(tmp_path / "s"), *out)
    assert first.exit_code == 0, first.output
    assert {run.optimizer for run in load_records(tmp_path / "out")} == {"own"}
    tables = (tmp_path / "out" / "tables.md").read_text(encoding="utf-8")
    assert f"{WAYS['rules']}: no finished run" in tables
    (kept,) = load_kept(tmp_path / "out")
    replace(kept, diverged=("rules", "own")).save(tmp_path / "out")
    second = run("suggest", "tiny", "--ways", "swept", *out)  # without --sweep: it is remembered
    assert second.exit_code == 0, second.output
    assert {run.optimizer for run in load_records(tmp_path / "out")} == {"own", "swept"}
    (kept,) = load_kept(tmp_path / "out")
    assert kept.diverged == ("rules", "own") and kept.sweep["trials"] == 7
    assert run("suggest", "tiny", "--ways", "rules", *out).exit_code == 0
    assert load_kept(tmp_path / "out")[0].diverged == ("own",)  # trained again, and well
    assert "'mine' is none of own" in run("suggest", "tiny", "--ways", "mine", *out).output


def test_ways_that_agree_share_their_runs():
    one, other = Tuned("svgd", (0.1,), {"scale": 0.1}), Tuned("svgd", (0.1,), {"scale": 0.2})
    found = [Found("own", one, {}), Found("rules", other, {}), Found("rule-sgd", one, {"x": 1})]
    assert columns_of(found) == {"own": "own", "rules": "rules", "rule-sgd": "own"}


def test_settings_that_blow_up_are_noted_and_the_others_go_on(tmp_path, monkeypatch):
    tuned = Tuned("svgd", (1e30, 1e30), {"scale": 1.0})
    wild = replace(TINY, name="wild", optimizers={**TINY.optimizers, "svgd": tuned})
    monkeypatch.setitem(RECIPES, "wild", wild)
    result = run("suggest", "wild", "--seeds", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (kept,) = load_kept(tmp_path)
    assert kept.diverged == (OWN,)
    assert not list(tmp_path.glob("wild-own-*")) and len(load_records(tmp_path)) >= 3
    tables = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert "| diverged | – | – |" in tables
    assert "- Diverged: the paper's settings." in tables
    assert "- Seeds of each: 1." in tables


def test_a_captured_run_that_left_the_finite_numbers_counts_as_diverged(tmp_path):
    run("suggest", "tiny", "--seeds", 2, "--out", tmp_path)
    records, kept = load_records(tmp_path), load_kept(tmp_path)
    for record in records:
        if record.optimizer == "rules":
            record.curve.test_loss[-1] = math.nan
    (content,) = contents_of(kept, records)
    (row,) = [row for row in content.table.rows if row.label == WAYS["rules"]]
    assert [entry.text for entry in row.entries[3:]] == ["diverged", "–", "–"]


def test_records_of_other_settings_are_refused(tmp_path):
    run("suggest", "tiny", "--seeds", 1, "--out", tmp_path)
    records, kept = load_records(tmp_path), load_kept(tmp_path)
    next(record for record in records if record.optimizer == "rules").settings["scale"] = 0.5
    with pytest.raises(RecordError, match="trained with other settings"):
        contents_of(kept, records)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"recipe": "mlp"}, "a sweep of 'mlp'"),
        ({"optimizers": {}}, "no best settings of SVGD"),
        ({"seeds": None, "optimizers": {"svgd": {"best": None}}}, "no best settings of SVGD"),
    ],
)
def test_a_sweep_that_does_not_fit(tmp_path, changes, given):
    with pytest.raises(RecordError, match=given):
        best_of_sweep(a_sweep(tmp_path / "sweep", **changes), TINY)


def test_a_folder_without_a_summary(tmp_path):
    result = run("suggest", "tiny", "--sweep", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 1 and "no best settings of SVGD" in result.output
    assert not (tmp_path / "out").exists()


def test_wrong_uses(tmp_path):
    assert "'nothing' is none of mlp" in run("suggest", "nothing", "--out", tmp_path).output
    assert "missing: choose one of mlp" in run("suggest", "--out", tmp_path).output
    result = run("suggest", "--table", "--out", tmp_path)
    assert result.exit_code == 1 and "without files such as" in result.output
    (tmp_path / "tiny-settings.json").write_text("{}")
    result = run("suggest", "--table", "--out", tmp_path)
    assert result.exit_code == 1 and "cannot be read" in result.output


def test_control_c_says_how_to_go_on(tmp_path, monkeypatch):
    def stopped(job, console):
        raise KeyboardInterrupt

    monkeypatch.setattr("virtualgrad.lab.settings.command.compare", stopped)
    result = run("suggest", "tiny", "--out", tmp_path)
    assert result.exit_code == 130 and "the same command with --resume" in result.output


def test_a_recipe_without_an_optimizer_to_start_from():
    optimizers = {name: TINY.optimizers[name] for name in ("svgd", "sgd", "adam")}
    with pytest.raises(HyperparameterError, match="'tiny' without rmsprop"):
        find_settings(replace(TINY, optimizers=optimizers), tiny_data(), CPU)


# ---------------------------------------------------------------- what was measured


@pytest.mark.skipif(not RESULTS.exists(), reason="nothing was measured yet")
def test_the_page_shows_what_the_records_say():
    begin, end = marks("suggestions")
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    shown = text.partition(begin)[2].partition(end)[0].strip()
    expected = written(contents_of(load_kept(RESULTS), load_records(RESULTS)))
    assert shown == expected.strip()
    assert (RESULTS / "tables.md").read_text(encoding="utf-8") == expected
