"""bfloat16 beside full precision: runs paired by seed, and told apart or not."""

import pytest
import typer
from typer.testing import CliRunner

from virtualgrad.lab.record import RecordError
from virtualgrad.lab.report import report
from virtualgrad.lab.report.markdown import written
from virtualgrad.lab.report.precision import precision_contents
from virtualgrad.lab.report.readme import marks

app = typer.Typer()
app.command()(report)


def runs(make, optimizer, ends, amp, recipe="resnet20", **settings):
    found = [
        make(recipe, optimizer, seed, last=end, lowest=end - 0.1, ms_per_step=1.0 if amp else 2.5)
        for seed, end in enumerate(ends)
    ]
    for run in found:
        run.settings |= {"amp": amp, "device": "cuda", **settings}
    return found


def test_table_in_closed_form(make):
    low = [*runs(make, "sgd", (11.1, 11.2, 11.3), True), *runs(make, "adam", (12.0,), True)]
    full = runs(make, "sgd", (11.0, 11.0, 11.0), False)
    expected = (
        "### ResNet-20 on CIFAR-10\n"
        "\n"
        "|  | bfloat16 | TF32 | difference |\n"
        "| --- | ---: | ---: | ---: |\n"
        # 0.1, 0.2, 0.3: standard error 0.1 / sqrt(3) = 0.058, and 4.303 of them are 0.248.
        "| SGD: last error, % | 11.20 ± 0.10 | 11.00 ± 0.00 | +0.20 ± 0.06 |\n"
        "| SGD: lowest error, % | 11.10 ± 0.10 | 10.90 ± 0.00 | +0.20 ± 0.06 |\n"
        "| SGD: ms per step | 1.00 | 2.50 | – |\n"
        "\n"
        "- SGD: bfloat16 in place of TF32 changes the last error by +0.20 points (95 % interval "
        "−0.05 to +0.45) and the lowest by +0.20 points (95 % interval −0.05 to +0.45): no loss "
        "beyond noise (3 seeds).\n"
    )
    assert written(precision_contents(low, full)).startswith(expected)
    assert written(precision_contents(full, low)).startswith(expected)  # in whatever order


@pytest.mark.parametrize(
    ("ends", "words", "holds"),
    [((11.5, 11.6), "a loss beyond noise", True), ((10.4, 10.5), "no loss beyond noise", False)],
)
def test_a_loss_is_called_one(make, ends, words, holds):
    low, full = runs(make, "sgd", ends, True), runs(make, "sgd", (11.0, 11.1), False)
    ((finding,),) = [content.findings for content in precision_contents(low, full)]
    assert words in finding.text and finding.holds is not holds


def test_a_loss_in_the_lowest_error_alone_is_one_too(make):
    low, full = runs(make, "sgd", (11.5, 11.6), True), runs(make, "sgd", (11.5, 11.6), False)
    for run in full:
        run.curve.test_error[-2] -= 0.5
    ((finding,),) = [content.findings for content in precision_contents(low, full)]
    assert "by +0.00 points (95" in finding.text and "a loss beyond noise" in finding.text
    assert finding.holds is False


def test_only_common_seeds_count_and_one_tells_nothing(make):
    low, full = runs(make, "sgd", (11.5, 99.0), True), runs(make, "sgd", (11.0,), False)
    (content,) = precision_contents(low, full)
    assert str(content.table.rows[0].entries[0]) == "11.50 ± –"
    assert content.findings[0].text == "SGD: with one seed, chance cannot be told from merit."


def test_on_a_cpu_the_other_format_is_float32(make):
    low = runs(make, "sgd", (11.5,), True, device="cpu")
    full = runs(make, "sgd", (11.0,), False, device="cpu")
    assert precision_contents(low, full)[0].table.columns == ("bfloat16", "float32", "difference")


def test_other_differences_are_refused(make):
    low, full = runs(make, "sgd", (11.5,), True), runs(make, "sgd", (11.0,), False, batch_size=64)
    with pytest.raises(
        RecordError, match=r"resnet20-sgd-seed0\.json that differ.*batch_size is 128 and 64"
    ):
        precision_contents(low, full)


def test_a_setting_that_only_a_later_version_records_is_no_difference(make):
    low, full = runs(make, "sgd", (11.5,), True), runs(make, "sgd", (11.0,), False, compiled=True)
    assert len(precision_contents(low, full)) == 1


@pytest.mark.parametrize("amp", [True, False])
def test_nothing_in_common(make, amp):
    low = runs(make, "sgd", (11.5,), True)
    other = runs(make, "sgd" if amp else "adam", (11.0,), amp)
    with pytest.raises(RecordError, match=r"without a finished run in common.*--amp"):
        precision_contents(low, other)


def test_the_command(make, saved, tmp_path):
    full = saved(runs(make, "sgd", (11.0, 11.1), False), tmp_path / "full")
    low = saved(runs(make, "sgd", (11.0, 11.2), True), tmp_path / "low")
    begin, end = marks("precision")
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{begin}\n{end}\nbelow\n", encoding="utf-8")
    result = CliRunner().invoke(app, [str(full), "--beside", str(low), "--readme", str(readme)])
    assert result.exit_code == 0, result.output
    assert "bfloat16" in result.output and "precision.md" in result.output
    text = (full / "precision.md").read_text(encoding="utf-8")
    assert text.strip() in readme.read_text(encoding="utf-8")
    assert {path.suffix for path in full.iterdir()} == {".json", ".md"}  # and nothing else


def test_the_command_may_write_elsewhere(make, saved, tmp_path):
    full = saved(runs(make, "sgd", (11.0,), False), tmp_path / "full")
    low = saved(runs(make, "sgd", (11.0,), True), tmp_path / "low")
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [str(full), "--beside", str(low), "--out", str(out)])
    assert result.exit_code == 0 and [path.name for path in out.iterdir()] == ["precision.md"]


def test_the_command_explains(make, saved, tmp_path):
    low = saved(runs(make, "sgd", (11.0,), True), tmp_path / "low")
    result = CliRunner().invoke(app, [str(low), "--beside", str(low)])
    assert result.exit_code == 1 and "next step:" in result.output
