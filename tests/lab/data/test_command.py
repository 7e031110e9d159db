"""The command line's `data`, as a user meets it."""

import pytest
import typer
from typer.testing import CliRunner

from virtualgrad.lab.data.command import data
from virtualgrad.lab.data.datasets import DATASETS
from virtualgrad.lab.data.download import HttpFiles


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("data")(data)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_it_fetches_and_shows_what_was_checked(mnist, server, tmp_path, monkeypatch, run):
    monkeypatch.setitem(DATASETS, "mnist", mnist.asking(HttpFiles(server.offer(mnist))))
    result = run("mnist", "--folder", tmp_path / "data")
    assert result.exit_code == 0
    assert "MNIST: complete" in result.stdout and "MD5 as published" in result.stdout
    assert f"in {tmp_path}/data/MNIST/raw, after" in result.stdout
    assert "4 of 4 files, checked" in " ".join(result.stderr.split())
    for file in mnist.record.files:
        assert file.name in result.stdout and f"{file.size:,}" in result.stdout
    again = run("mnist", "--folder", tmp_path / "data")
    assert again.exit_code == 0 and again.stderr == ""


def test_it_fails_with_the_reasons(mnist, tmp_path, monkeypatch, run):
    monkeypatch.setitem(DATASETS, "mnist", mnist.asking(HttpFiles("http://127.0.0.1:9/")))
    result = run("mnist", "--folder", tmp_path)
    assert result.exit_code == 1 and result.stdout == ""
    assert "  - official download from 127.0.0.1:9: not reachable (" in result.stderr


def test_it_names_the_data_sets(run):
    assert "mnist" in run("--help").stdout and "cifar10" in run("--help").stdout
    assert run("imagenet").exit_code == 2
