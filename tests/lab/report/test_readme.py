"""The tables of README and documentation are those of the measured records, to the letter."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest
from typer.testing import CliRunner

from virtualgrad.lab.cli import app
from virtualgrad.lab.record import RecordError, load_records
from virtualgrad.lab.report.markdown import PLACE, READINGS, SHORT, readme_blocks, written
from virtualgrad.lab.report.precision import precision_contents
from virtualgrad.lab.report.readme import marks, update_readme
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.sweep.comparison import PLACE as SWEEPS
from virtualgrad.lab.sweep.comparison import compared, load_summaries

ROOT = Path(__file__).parents[3]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "reproducing.md"
PAPER, REPEATED, CHOICES, PRECISION = (
    ROOT / "results" / name for name in ("paper", "repeated", "readings", "precision")
)


def shown(page: Path, name: str) -> str:
    begin, end = marks(name)
    text = page.read_text(encoding="utf-8")
    return text.partition(begin)[2].partition(end)[0].strip()


def measured(folder: Path) -> pytest.MarkDecorator:
    found = any(folder.glob("*-seed*.json"))
    return pytest.mark.skipif(not found, reason=f"nothing was measured in {folder.name} yet")


@pytest.mark.parametrize(
    ("folder", "page", "name"),
    [
        (PAPER, README, SHORT),
        (PAPER, PAGE, PLACE),
        pytest.param(CHOICES, PAGE, READINGS, marks=measured(CHOICES)),
    ],
)
def test_pages_show_what_the_records_say(folder: Path, page: Path, name: str) -> None:
    blocks = readme_blocks(gather(load_records(folder)), page.read_text(encoding="utf-8"))
    assert {name: shown(page, name)} == {name: text.strip() for name, text in blocks.items()}


@measured(PRECISION)
def test_the_page_shows_what_bfloat16_costs() -> None:
    contents = precision_contents(load_records(PRECISION), load_records(REPEATED))
    assert shown(PAGE, "precision") == written(contents).strip()


def test_all_sixty_runs_are_finished_and_on_real_data() -> None:
    records = load_records(PAPER)
    assert len(records) == 60
    assert all(record.finished for record in records)
    assert {record.data["name"] for record in records} == {"MNIST", "CIFAR-10"}
    assert {record.environment["device"] for record in records} == {"NVIDIA H200"}


def test_what_is_said_of_the_second_measurement_is_what_its_records_say() -> None:
    assert len(load_records(REPEATED)) == 60
    first, again = (
        json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for folder in (PAPER, REPEATED)
    )
    text = PAGE.read_text(encoding="utf-8")
    for optimizer in ("SVGD", "SGD"):
        lowest = [f"{mean(again[name][optimizer.lower()]['lowest']):.2f}" for name in again]
        mlp, vgg, resnet20 = lowest
        given = re.search(rf"{optimizer} {mlp}.*? {vgg}.*? {resnet20} %", text)
        assert given, (optimizer, lowest)
    for name, shown_as in (("vgg", "+0.11 ± 0.20"), ("resnet20", "1.70 ± 0.12")):
        pairs = [
            a - b
            for each in (first, again)
            for a, b in zip(each[name]["svgd"]["lowest"], each[name]["sgd"]["lowest"], strict=True)
        ]
        change, error = mean(pairs), stdev(pairs) / len(pairs) ** 0.5
        assert shown_as in {f"{change:+.2f} ± {error:.2f}", f"{-change:.2f} ± {error:.2f}"}
        assert shown_as in text and shown_as in README.read_text(encoding="utf-8")


def test_what_is_said_of_the_sweeps_is_what_their_records_say() -> None:
    page = ROOT / "docs" / "sweeps.md"
    text = written([compared(load_summaries(ROOT / "results" / "sweeps"))])
    assert shown(page, SWEEPS) == text.strip()
    (behind,) = re.findall(r"SVGD less RMSProp: \+(\d+\.\d+) points", text)
    said = f"{float(behind):.1f} points behind RMSProp on VGG"
    assert said in README.read_text(encoding="utf-8")


def test_the_command_updates_a_readme_in_its_place(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    begin, end = marks("tables")
    readme.write_text(f"above\n{begin}\nold\n{end}\nbelow\n", encoding="utf-8")
    arguments = ["report", str(PAPER), "--out", str(tmp_path / "out"), "--readme", str(readme)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("above\n") and text.endswith("below\n")
    assert "old" not in text and "ResNet-20 on CIFAR-10" in text


def test_a_readme_without_a_place_is_named_and_kept(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    begin, end = marks("tables")
    text = f"{begin}\n{end}\n"
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match=r"README\.md without a place for the readings"):
        update_readme(readme, {"tables": "new", "readings": "new"})
    assert readme.read_text(encoding="utf-8") == text
