"""The README's tables are those of the measured records, to the letter."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from virtualgrad.lab.cli import app
from virtualgrad.lab.record import RecordError, load_records
from virtualgrad.lab.report.markdown import markdown
from virtualgrad.lab.report.readme import BEGIN, END, update_readme
from virtualgrad.lab.report.sections import gather

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "paper"


def test_readme_shows_what_the_records_say() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == markdown(gather(load_records(RESULTS))).strip()


def test_all_sixty_runs_are_finished_and_on_real_data() -> None:
    records = load_records(RESULTS)
    assert len(records) == 60
    assert all(record.finished for record in records)
    assert {record.data["name"] for record in records} == {"MNIST", "CIFAR-10"}
    assert {record.environment["device"] for record in records} == {"NVIDIA H200"}


def test_the_command_updates_a_readme_in_its_place(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n", encoding="utf-8")
    arguments = ["report", str(RESULTS), "--out", str(tmp_path / "out"), "--readme", str(readme)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("below\n")
    assert "old" not in text and "ResNet-20 on CIFAR-10" in text


def test_a_readme_without_a_place_is_named(tmp_path: Path) -> None:
    readme, tables = tmp_path / "README.md", tmp_path / "tables.md"
    readme.write_text("nothing", encoding="utf-8")
    tables.write_text("tables", encoding="utf-8")
    with pytest.raises(RecordError, match=r"README\.md without a place"):
        update_readme(readme, tables)
    assert readme.read_text(encoding="utf-8") == "nothing"
