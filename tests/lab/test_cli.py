"""The command line as a user meets it: help, clear refusals, one whole experiment."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tiny_lab import TINY, tiny_data
from typer.testing import CliRunner

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab import cli, reproduce_command
from virtualgrad.lab.data import DataUnavailableError
from virtualgrad.lab.readings import READINGS
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import Record, load_records
from virtualgrad.lab.reproduce import DATA


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    monkeypatch.setitem(DATA, "tiny", tiny_data)


def run(*arguments):
    return CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )


def test_help_names_every_command_without_torch():
    code = (
        "import sys; from virtualgrad.lab.cli import app; app(['--help'], standalone_mode=False);"
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not [name for name in cli.COMMANDS if name not in done.stdout]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help(name):
    result = run(name, "--help")
    assert result.exit_code == 0 and f" {name} [OPTIONS]" in result.output
    assert cli.command_named(name).help.partition("\n\n")[0] == cli.COMMANDS[name]


def test_a_command_that_does_not_exist():
    result = run("reprodce")
    assert result.exit_code == 2 and "Did you mean 'reproduce'?" in result.output


def test_one_experiment(tmp_path):
    result = run("reproduce", "tiny", "--seeds", 2, "--first-seed", 3, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Tiny" in result.output and "virtualgrad report" in result.output
    assert {record.seed for record in load_records(tmp_path)} == {3, 4}
    assert len(load_records(tmp_path)) == 8


def test_columns_and_fewer_steps_than_milestones(tmp_path):
    result = run("reproduce", "tiny", "--optimizers", "sgd, svgd,sgd", "--seeds", 1, "--steps", 13,
                 "--device", "cpu", "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [record.curve.step for record in load_records(tmp_path)] == [[10, 13]] * 2
    again = run("reproduce", "tiny", "--optimizers", "sgd,svgd", "--seeds", 1, "--steps", 13,
                "--device", "cpu", "--out", tmp_path, "--resume")  # fmt: skip
    assert again.exit_code == 0 and again.output.count("finished before") == 2


def test_readings(tmp_path):
    result = run("reproduce", "tiny", "--readings", "--seeds", 2, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    records = load_records(tmp_path)
    assert {record.optimizer for record in records} == set(READINGS) and len(records) == 14
    assert "Readings of SVGD, Tiny" in result.output
    chosen = run("reproduce", "tiny", "--readings", "--optimizers", "released,algorithm-1",
                 "--seeds", 1, "--out", tmp_path, "--resume")  # fmt: skip
    assert chosen.exit_code == 0 and chosen.output.count("finished before") == 2


def test_readings_of_a_recipe_without_svgd(tmp_path, monkeypatch):
    without = replace(TINY, optimizers={"sgd": TINY.optimizers["sgd"]})
    monkeypatch.setitem(RECIPES, "tiny", without)
    result = run("reproduce", "tiny", "--readings", "--out", tmp_path)
    assert result.exit_code == 1 and "without the optimizer 'svgd'" in result.stderr


def test_training_needs_neither_pooch_nor_jinja():
    """A machine with the data at hand may have neither."""
    code = (
        "import sys; sys.modules.update(pooch=None, jinja2=None, markupsafe=None);"
        "import virtualgrad.lab.reproduce_command"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_recipes(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce_command, "RECIPES", {"tiny": TINY})
    result = run("reproduce", "all", "--optimizers", "sgd", "--seeds", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["alexnet"], "'alexnet' is none of mlp, vgg, resnet20, tiny, all"),
        (["tiny", "--optimizers", "sgd,adagrad"], "'adagrad' is none of sgd, rmsprop, adam, svgd"),
        (["tiny", "--readings", "--optimizers", "svgd"], "'svgd' is none of released, updated-fi"),
        (["mlp", "--readings", "--optimizers", "shared-positions"], "is none of released,"),
        (["tiny", "--seeds", "0"], "should be greater than or equal to 1"),
        (["tiny", "--steps", "0"], "should be greater than or equal to 1"),
        (["tiny", "--device", "tpu"], "'tpu' is none of auto, cpu, cuda"),
        (["tiny", "--device", "cuda:x"], "'cuda:x' is none of auto, cpu, cuda"),
        (["tiny", "--device", "cuda:99"], "CUDA devices here; use cpu or auto"),
    ],
)
def test_refusals(arguments, words, tmp_path):
    result = run("reproduce", *arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_cuda_where_there_is_none(tmp_path):
    result = run("reproduce", "tiny", "--device", "cuda", "--out", tmp_path)
    assert result.exit_code == 2 and "PyTorch finds 0 CUDA devices here" in result.output


@pytest.mark.parametrize(
    "error", [VirtualGradError("a [clear] message"), PermissionError(13, "a [clear] message")]
)
def test_errors_are_messages(monkeypatch, tmp_path, error):
    def fail():
        raise error

    monkeypatch.setitem(DATA, "tiny", fail)
    result = run("reproduce", "tiny", "--out", tmp_path)
    assert result.exit_code == 1 and "a [clear] message" in result.stderr
    assert "Traceback" not in result.output


def test_data_that_cannot_be_had(monkeypatch, tmp_path):
    def fail():
        raise DataUnavailableError("no source answers")

    monkeypatch.setitem(DATA, "cifar10", fail)
    result = run("reproduce", "vgg", "--out", tmp_path)
    assert result.exit_code == 1 and "no source answers" in result.stderr


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "tiny-sgd-seed0.json").write_text("{")
    result = run("reproduce", "tiny", "--out", tmp_path, "--resume")
    assert result.exit_code == 1 and "tiny-sgd-seed0.json, which cannot be read" in result.stderr


def test_ctrl_c_says_how_to_go_on(monkeypatch, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("virtualgrad.lab.run.Run.look", stop)
        result = run("reproduce", "tiny", "--seeds", 1, "--out", tmp_path)
    assert result.exit_code == 130 and "the same command with --resume" in result.output
    result = run("reproduce", "tiny", "--seeds", 1, "--out", tmp_path, "--resume")
    assert result.exit_code == 0 and Record.load(tmp_path / "tiny-sgd-seed0.json").finished


def test_main_is_the_app(monkeypatch):
    monkeypatch.setattr(cli, "app", lambda: print("ran"))
    cli.main()
