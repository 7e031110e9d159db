"""Several sweeps as one table."""

import json

import pytest
from typer.testing import CliRunner

from virtualgrad.lab import cli
from virtualgrad.lab.record import RecordError
from virtualgrad.lab.sweep.comparison import compared, load_summaries


def write_summary(folder, recipe, errors, trials=2):
    """The summary of a sweep in which each optimizer's best settings had these errors."""
    optimizers = {
        name: {"best": {"errors": each}, "share": 0.25, "trials": [{}] * trials}
        for name, each in errors.items()
    }
    summary = {"recipe": recipe, "seeds": 2, "steps": 1000, "amp": recipe != "mlp"}
    (folder / recipe).mkdir()
    text = json.dumps({**summary, "optimizers": optimizers})
    (folder / recipe / "summary.json").write_text(text)


@pytest.fixture
def sweeps(tmp_path):
    write_summary(tmp_path, "vgg", {"sgd": [20.0, 22.0], "svgd": [18.0, 20.0]})
    write_summary(tmp_path, "mlp", {"muon": [2.0, 2.0], "sgd": [1.0, 3.0], "svgd": [2.0, 4.0]})
    return tmp_path


def test_optimizers_are_rows_and_networks_columns_in_the_order_of_the_recipes(sweeps):
    table = compared(load_summaries(sweeps)).table
    assert [row.label for row in table.rows] == ["SGD", "Muon", "SVGD"]
    assert [column.split(",")[0] for column in table.columns[::2]] == [
        "MLP on MNIST",
        "VGG on CIFAR-10",
    ]
    entries = [[str(entry) for entry in row.entries] for row in table.rows]
    assert entries[0] == ["2.00 ± 1.41", "25", "21.00 ± 1.41", "25"]
    assert entries[1] == ["2.00 ± 0.00", "25", "–", "–"]
    assert [row.entries[2].best for row in table.rows] == [False, False, True]


def test_svgd_is_compared_with_the_best_of_the_others(sweeps):
    mlp, vgg = (finding.text for finding in compared(load_summaries(sweeps)).findings)
    assert "2 trials each, 2 seeds, 1,000 steps, fp32" in mlp
    # Two seeds 1 apart from their mean: sd sqrt(2), of the mean 1, of the difference sqrt(2).
    assert vgg.endswith("bfloat16 autocast. SVGD less SGD: -2.00 points (standard error 1.41).")


def test_unequal_numbers_of_trials_are_told(tmp_path):
    write_summary(tmp_path, "vgg", {"sgd": [20.0], "svgd": [18.0]})
    path = tmp_path / "vgg" / "summary.json"
    summary = json.loads(path.read_text())
    summary["optimizers"]["sgd"]["trials"] = [{}] * 5
    path.write_text(json.dumps(summary))
    (finding,) = compared(load_summaries(tmp_path)).findings
    assert "2 to 5 trials" in finding.text and "one seed each" in finding.text


def test_the_command_puts_it_into_a_page(sweeps):
    page = sweeps / "page.md"
    page.write_text("before\n<!-- sweeps: begin -->\n<!-- sweeps: end -->\nafter\n")
    result = CliRunner().invoke(cli.app, ["sweep", "--table", str(sweeps), "--page", str(page)])
    assert result.exit_code == 0, result.output
    assert "| Muon | **2.00 ± 0.00** | 25 | – | – |" in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(RecordError, match=r"no folder has a summary\.json"):
        load_summaries(tmp_path)
    (tmp_path / "mlp").mkdir()
    for text in ("{", "[]", '{"optimizers": {"sgd": {}}}'):
        (tmp_path / "mlp" / "summary.json").write_text(text)
        with pytest.raises(RecordError, match="no summary of a sweep"):
            load_summaries(tmp_path)
