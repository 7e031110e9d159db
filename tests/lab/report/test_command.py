"""`virtualgrad report` as a user meets it: files written, and clear words where it cannot."""

import pytest
import typer
from typer.testing import CliRunner

from virtualgrad.lab.record import Record
from virtualgrad.lab.report import report, write_report

app = typer.Typer()
app.command()(report)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_writes_everything_beside_the_records(make, saved, tmp_path):
    saved([make()], tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "MLP on MNIST" in result.output and "report.html" in result.output
    names = {path.name for path in tmp_path.iterdir()} - {"mlp-svgd-seed0.json"}
    plots = {
        f"{kind}-mlp.{ending}" for kind in ("error", "loss", "cost") for ending in ("png", "svg")
    }
    assert names == {"report.html", "summary.json", "tables.md", *plots}


def test_out_may_be_elsewhere_and_is_made(make, saved, tmp_path):
    saved([make()], tmp_path / "records")
    result = run(tmp_path / "records", "--out", tmp_path / "a" / "b")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a" / "b" / "report.html").exists()
    assert len(list((tmp_path / "records").iterdir())) == 1


def test_the_same_records_give_the_same_files(make, saved, tmp_path):
    saved([make(seed=0), make(seed=1, lowest=1.8)], tmp_path / "records")
    for out in ("one", "two"):
        write_report(tmp_path / "records", tmp_path / out)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


def test_its_own_output_is_not_taken_for_records(make, saved, tmp_path):
    saved([make()], tmp_path)
    first = write_report(tmp_path).read_text()
    assert write_report(tmp_path).read_text() == first


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder, make: None, "without records of runs"),
        (
            lambda folder, make: make().save(folder).write_text('{"recipe": "ml'),
            "mlp-svgd-seed0.json, which cannot be read as a record",
        ),
        (lambda folder, make: make(finished=False).save(folder), "no finished run"),
        (
            lambda folder, make: [
                make(seed=0).save(folder),
                make(seed=1, settings={"amp": True}).save(folder),
            ],
            "mlp-svgd-seed0.json and mlp-svgd-seed1.json, which differ",
        ),
    ],
    ids=["empty", "damaged", "unfinished", "mixed"],
)
def test_bad_folders_are_explained_without_a_traceback(make, tmp_path, prepare, words):
    prepare(tmp_path, make)
    before = sorted(tmp_path.iterdir())
    result = run(tmp_path)
    assert result.exit_code == 1
    assert words in result.output
    assert "next step:" in result.output
    assert "Traceback" not in result.output
    assert sorted(tmp_path.iterdir()) == before


def test_a_failure_while_writing_leaves_the_old_files(make, saved, tmp_path, monkeypatch):
    saved([make()], tmp_path)
    write_report(tmp_path)
    old = (tmp_path / "error-mlp.png").read_bytes()
    saved([make(lowest=1.9)], tmp_path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("virtualgrad.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path)
    assert (tmp_path / "error-mlp.png").read_bytes() == old
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_help_teaches():
    result = run("--help")
    assert "report.html" in result.output and "virtualgrad reproduce" in result.output


def test_records_survive_the_round_trip_that_the_report_relies_on(make, tmp_path):
    record = make()
    assert Record.load(record.save(tmp_path)) == record
