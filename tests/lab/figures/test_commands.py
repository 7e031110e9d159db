"""The commands as a user calls them: numbers printed, pictures left."""

import pytest
import typer
from typer.testing import CliRunner

from virtualgrad.lab.figures import lemma, paths, theorem
from virtualgrad.lab.figures.style import name_panels, paper, save

COMMANDS = {
    "lemma": ["--n", "2", "--lam", "1", "--pairs", "4", "--matrices", "200"],
    "theorem": ["--trials", "200", "--networks", "3"],
    "paths": ["--starts", "4"],
}
TELLS = {"lemma": ["R^2", "0.7143"], "theorem": ["diag 1:100", "Sign"], "paths": ["k = 6", "slope"]}
TEACHES = {
    "lemma": ["proportional", "--law", "10,000"],
    "theorem": ["lowers the loss", "corollary"],
    "paths": ["Taylor", "deepest"],
}


@pytest.fixture(scope="module")
def app():
    application = typer.Typer()
    for command in (lemma, theorem, paths):
        application.command()(command)
    return application


@pytest.mark.parametrize("name", COMMANDS)
def test_command_prints_its_numbers_and_leaves_its_picture(app, name, tmp_path):
    folder = tmp_path / "made" / "here"
    result = CliRunner().invoke(app, [name, *COMMANDS[name], "--out", str(folder)])
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in TELLS[name])
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / f"{name}.svg").read_text()
    assert sorted(file.suffix for file in folder.iterdir()) == [".png", ".svg"]


def test_scaled_law_is_an_option(app, tmp_path):
    options = [*COMMANDS["lemma"], "--law", "scaled", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["lemma", *options])
    assert result.exit_code == 0, result.output
    assert "scaled law" in result.output


@pytest.mark.parametrize("lam", ["-1", "0", "nan", "inf"])
def test_a_norm_is_a_positive_number(app, lam, tmp_path):
    options = ["--n", "2", "--lam", "1", "--lam", lam, "--pairs", "4", "--matrices", "200"]
    result = CliRunner().invoke(
        app, ["lemma", *options, "--out", str(tmp_path)], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert result.exit_code == 2, result.output
    assert "is no norm: a finite number above 0" in result.output and lam in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches(app, name):
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert all(word in result.output for word in [*TEACHES[name], "--seed", "--out"])


def test_a_figure_is_saved_as_the_same_bytes_every_time(tmp_path):
    def make(folder):
        with paper(2, 2) as figure:
            panel = figure.subplots()
            panel.plot([0, 1], [1, 0])
            name_panels([panel], ["a line"])
            return [file.read_bytes() for file in save(figure, folder, "figure")]

    assert make(tmp_path / "one") == make(tmp_path / "two")
