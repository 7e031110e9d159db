"""The installed command `virtualgrad`, also where only the library was installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE, FUNCTION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "scripts"
]["virtualgrad"].split(":")


def call(*arguments, without=()):
    """Run the command as pip's script does, in a Python that lacks some packages."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({tuple(without)!r}))\n"
        f"from {MODULE} import {FUNCTION}; sys.exit({FUNCTION}())"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_with_everything_installed_it_is_the_command_line():
    done = call("--help")
    assert done.returncode == 0 and "reproduce" in done.stdout and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ([], "typer"),
        (["--help"], "typer"),
        (["lemma", "--help"], "matplotlib"),  # typer is there: other packages bring it, too
    ],
    ids=["no-arguments", "help", "typer-but-no-matplotlib"],
)
def test_without_the_lab_it_says_what_to_install(arguments, missing):
    done = call(*arguments, without=[missing])
    assert done.returncode == 1 and done.stdout == ""
    assert f"without the package '{missing}'" in done.stderr
    assert 'pip install ".[lab]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_of_our_own_that_is_missing_is_a_bug_and_stays_one():
    done = call("report", "--help", without=["virtualgrad.lab.report"])
    assert done.returncode == 1 and "Traceback" in done.stderr and "[lab]" not in done.stderr
