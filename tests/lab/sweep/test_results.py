"""Tables, sentences, recipes and pages from trials whose best and share are known."""

import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console
from sweep_fakes import trial
from tiny_lab import TINY

from virtualgrad.lab.recipes import RECIPES, Tuned
from virtualgrad.lab.report.terminal import print_contents
from virtualgrad.lab.sweep.results import Result, content_of, findings
from virtualgrad.lab.sweep.search import End
from virtualgrad.lab.sweep.spaces import SPACES
from virtualgrad.lab.sweep.texts import snippet, summary
from virtualgrad.lab.sweep.write import write_results

SGD = SPACES["sgd"].ranges["lr"]
SVGD = SPACES["svgd"].ranges


def sgd(*places_and_errors):
    trials = [trial(n, SGD.at(p), error) for n, (p, error) in enumerate(places_and_errors)]
    return Result(TINY, "sgd", tuple(trials))


@pytest.fixture
def both():
    """SGD does well in 35 % of its range; SVGD in its half with small learning rates."""
    plain = sgd((0.1, (3.0, 3.2)), (0.4, (1.9, 2.1)), (0.8, (5.0, 5.0)))
    ours = [
        trial(0, SVGD["lr"].at(0.25), (1.0, 1.2, 1.4), scale=SVGD["scale"].at(0.5)),
        trial(1, SVGD["lr"].at(0.75), 100.0, End.DIVERGED, scale=SVGD["scale"].at(0.5)),
    ]
    return [plain, Result(TINY, "svgd", tuple(ours))]


def columns(results, of=str):
    table = content_of(results).table
    return {
        column: [of(row.entries[number]) for row in table.rows]
        for number, column in enumerate(table.columns)
    }


def test_the_table_by_hand(both):
    found = columns(both)
    assert [row.label for row in content_of(both).table.rows] == ["SGD", "SVGD"]
    # at places 0.4 of [0.001, 10] and 0.25: 0.001 * 10^1.6 and 0.01
    assert found["α"] == ["0.03981", "0.01"] and found["s"] == ["–", "0.01"]
    # sd of (1.9, 2.1) is 0.1 sqrt 2; of (1, 1.2, 1.4) it is 0.2
    assert found["last error, %"] == ["2.00 ± 0.14", "1.20 ± 0.20"]
    # 2 -+ 12.706 * 0.1 and 1.2 -+ 4.303 * 0.2 / sqrt 3
    reach = 4.303 * 0.2 / math.sqrt(3)
    assert found["95 % interval"] == ["0.73–3.27", f"{1.2 - reach:.2f}–{1.2 + reach:.2f}"]
    assert found["trials"] == ["3", "2"]
    assert found["pruned"] == ["0", "0"] and found["diverged"] == ["0", "1"]
    assert found["range within 0.5, %"] == ["35.0", "50.0"]
    best = columns(both, of=lambda entry: entry.best)
    assert best["last error, %"] == best["range within 0.5, %"] == [False, True]


def test_the_sentences(both):
    texts = [finding.text for finding in findings(both)]
    # sqrt(0.1414^2 / 2 + 0.2^2 / 3) = 0.1528
    assert texts[0] == (
        "SVGD has the lowest error, 1.20 %: 0.80 points below SGD (standard error 0.15)."
    )
    assert texts[1].startswith("SVGD is the least sensitive: 50 % of its range")
    assert "SGD: lowest error 2.00 % with lr 0.03981; 35.0 % of the range" in texts[2]
    assert texts[-1] == "Not the same number of trials for all: SGD 3, SVGD 2."


def test_doubts_are_told():
    close = [sgd((0.5, (2.0, 3.0))), Result(TINY, "adam", (trial(0, 1e-3, (2.2, 3.2)),))]
    assert "cannot tell the two apart" in findings(close)[0].text
    single = [sgd((0.5, 2.0)), Result(TINY, "adam", (trial(0, 1e-3, 3.0),))]
    assert "noise is not known" in findings(single)[0].text
    assert columns(single)["95 % interval"] == ["–", "–"]
    (_, edge) = findings([sgd((0.97, 2.0), (0.5, 3.0))])
    assert edge.holds is False and "SGD's best lr lies at an end of its range" in edge.text
    diverged = Result(TINY, "sgd", (trial(0, 0.1, 100.0, End.DIVERGED),))
    assert "every trial diverged" in findings([diverged])[0].text
    assert columns([diverged])["range within 0.5, %"] == ["–"]
    assert not any("least sensitive" in f.text for f in findings([diverged, diverged]))


def test_the_recipe_can_be_pasted(both):
    text = snippet(both)
    names = {"Tuned": Tuned}
    exec(text, names)
    assert names["optimizers"]["svgd"] == Tuned("svgd", (0.01, 0.004), {"scale": 0.01})
    assert names["optimizers"]["sgd"] == Tuned("sgd", (0.03981, 0.0199))
    assert "# 1.20 ± 0.20 %" in text and "at steps 25." in text


def test_the_summary_holds_every_trial(both):
    found = json.loads(json.dumps(summary(both, {"steps": 40})))
    assert found["recipe"] == "tiny" and found["steps"] == 40
    svgd = found["optimizers"]["svgd"]
    assert svgd["best"]["errors"] == [1.0, 1.2, 1.4] and svgd["best"]["mean"] == pytest.approx(1.2)
    assert svgd["share"] == pytest.approx(0.5)
    assert [each["end"] for each in svgd["trials"]] == ["complete", "diverged"]
    assert svgd["ranges"] == {"lr": [1e-3, 10], "scale": [1e-4, 1]}


def test_the_files(both, tmp_path):
    path = write_results(both, tmp_path, {"steps": 40}, warning="<digits>")
    names = {"sweep.html", "summary.json", "tables.md", "recipe.py"}
    for optimizer in ("sgd", "svgd"):
        for kind in ("error", "trials"):
            names |= {f"{kind}-{optimizer}.png", f"{kind}-{optimizer}.svg"}
    assert {file.name for file in tmp_path.iterdir()} == names
    page = path.read_text()
    assert "&lt;digits&gt;" in page and "Best settings, Tiny" in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # it needs nothing but itself
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert page.count("<svg") == 5  # SVGD has a heat map as well
    table = (tmp_path / "tables.md").read_text()
    assert "| SVGD | 0.01 | 0.01 | **1.20 ± 0.20** |" in table
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write_results(both, tmp_path, {"steps": 40}, warning="<digits>")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_on_the_terminal(both, console: Console):
    print_contents([content_of(both)], console)
    said = console.file.getvalue()
    assert "1.20 ± 0.20" in said and "✗ Not the same number of trials" in said


def test_a_recipe_without_phases():
    recipe = replace(RECIPES["mlp"], milestones=(), optimizers={"sgd": Tuned("sgd", (0.1,))})
    result = Result(recipe, "sgd", (trial(0, 0.1, 2.0),))
    assert "changes at" not in snippet([result]) and result.tuned.lr == (0.1,)
