"""The command as a user meets it: help, clear refusals, whole sweeps of a tiny network."""

import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from sweep_fakes import a_search
from tiny_lab import TINY, a_job
from typer.testing import CliRunner

from virtualgrad.lab import cli
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.reproduce import make_runs
from virtualgrad.lab.run import Setup
from virtualgrad.lab.sweep.display import Display
from virtualgrad.lab.sweep.objective import Training
from virtualgrad.lab.sweep.search import DivergedError
from virtualgrad.lab.sweep.storage import Store
from virtualgrad.lab.sweep.studies import open_study


@pytest.fixture(autouse=True)
def tiny_recipe(monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", TINY)


@pytest.fixture
def no_plots(monkeypatch):
    """They take most of the time, and have tests of their own."""
    for module in ("write", "page"):
        monkeypatch.setattr(f"virtualgrad.lab.sweep.{module}.plots_of", lambda result: [])


def run(*arguments):
    return CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )


def test_help():
    result = run("sweep", "--help")
    assert result.exit_code == 0
    for word in ("--optimizer", "--trials", "--seeds", "--storage", "--workers", "--amp", "muon"):
        assert word in result.output


def test_one_optimizer(tmp_path, no_plots):
    arguments = ("sweep", "tiny", "--trials", 2, "--seeds", 2, "--workers", 1, "--out", tmp_path)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "Best settings, Tiny" in result.output and "The page: " in result.output
    found = json.loads((tmp_path / "summary.json").read_text())
    (svgd,) = found["optimizers"].values()
    assert len(svgd["trials"]) == 2 and len(svgd["best"]["errors"]) == 2
    assert (found["data"], found["seeds"], found["steps"]) == ("tiny", 2, 40)
    before = (tmp_path / "sweep.html").read_bytes()
    again = run(*arguments)  # all is done: only the report is made again
    assert again.exit_code == 0 and (tmp_path / "sweep.html").read_bytes() == before
    other = run(*arguments, "--steps", 20)
    assert other.exit_code == 1 and "steps 40 there, 20 here" in other.stderr
    assert (tmp_path / "sweep.html").read_bytes() == before
    beside = run(*arguments, "--steps", 20, "--name", "short")
    assert beside.exit_code == 0, beside.output


def test_all_optimizers_get_as_many_trials(tmp_path, no_plots):
    result = run("sweep", "tiny", "--optimizer", "all", "--trials", 2, "--seeds", 1, "--steps", 10,
                 "--workers", 1, "--device", "cpu", "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Left out: Muon; Muon steps matrices alone" in result.output
    found = json.loads((tmp_path / "summary.json").read_text())["optimizers"]
    assert list(found) == ["sgd", "sgd-momentum", "rmsprop", "adam", "adamw", "svgd"]
    assert {len(numbers["trials"]) for numbers in found.values()} == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["alexnet"], "'alexnet' is none of mlp, vgg, resnet20, tiny"),
        (["tiny", "--optimizer", "adagrad"], "'adagrad' is none of sgd, sgd-momentum, rmsprop"),
        (["tiny", "--optimizer", "sgd,all"], "'all' is none of"),
        (["tiny", "--optimizer", " "], "' ' is none of"),
        (["tiny", "--optimizer", "muon"], "'muon' cannot train tiny: Muon steps matrices alone"),
        (["tiny", "--trials", "0"], "should be greater than or equal to 1"),
        (["tiny", "--seeds", "0"], "should be greater than or equal to 1"),
        (["tiny", "--workers", "0"], "should be greater than or equal to 1"),
        (["tiny", "--device", "tpu"], "'tpu' is none of auto, cpu, cuda"),
    ],
)
def test_refusals(arguments, words, tmp_path):
    result = run("sweep", *arguments, "--out", tmp_path)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_cannot_be_reached(tmp_path):
    url = "postgresql://me:secret@127.0.0.1:1/trials"
    result = run("sweep", "tiny", "--storage", url, "--workers", 1, "--out", tmp_path)
    assert result.exit_code == 1 and "which cannot be used" in result.stderr
    assert "secret" not in result.output and "Traceback" not in result.output


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, no_plots):
    def stop(*_):
        raise KeyboardInterrupt

    arguments = ("sweep", "tiny", "--trials", 1, "--seeds", 1, "--workers", 1, "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("virtualgrad.lab.run.Run.look", stop)
        result = run(*arguments)
    assert result.exit_code == 130 and "To go on: the same command" in result.output
    assert run(*arguments).exit_code == 0


def test_without_optuna(tmp_path):
    code = (
        "import sys; sys.modules.update(optuna=None, sqlalchemy=None, psycopg=None);"
        "from virtualgrad.lab.data import load_digits;"
        "from virtualgrad.lab import cli, reproduce;"
        "reproduce.DATA['mnist'] = load_digits;"
        f"sys.argv = ['virtualgrad', 'sweep', 'mlp', '--out', {str(tmp_path)!r}]; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and 'pip install "virtualgrad[sweep]"' in done.stderr


def trained(settings, optimizer="sgd", **how):
    seen = []
    training = Training(TINY, optimizer, how.get("seeds", 2), Setup(torch.device("cpu")))
    errors = training()(settings, lambda *at: seen.append(at), lambda: None)
    return errors, seen


def test_a_trial_is_the_recipes_run(tmp_path, console):
    """With the recipe's own settings it ends where `reproduce` does, seed by seed."""
    errors, seen = trained({"lr": 0.05, "scale": 0.1}, "svgd")
    records = make_runs(a_job(tmp_path, seeds=(0, 1)), console)
    assert errors == tuple(record.final_error for record in records)
    means = [sum(pair) / 2 for pair in zip(*(r.curve.test_error for r in records), strict=True)]
    assert seen == list(zip([10, 20, 30, 40], means, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("sgd", {"lr": 1e30}), ("svgd", {"lr": 1e30, "scale": 1e5})],
)
def test_training_that_diverges_is_told(optimizer, settings):
    with pytest.raises(DivergedError):
        trained(settings, optimizer)


def test_the_live_display(tmp_path):
    terminal = Console(force_terminal=True, width=120, file=(tmp_path / "out").open("w"))
    search = a_search(tmp_path)
    store = Store(f"sqlite:///{tmp_path / 'sweep.db'}")
    with store.opened() as storage, terminal.file:
        study = open_study(search, store, storage)
        with Display([(search, study)], terminal) as display:
            display.tick()
            display.tick()
    said = (tmp_path / "out").read_text()
    assert "Fake fake" in said and "0/6" in said
