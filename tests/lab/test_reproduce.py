"""Whole experiments on tiny data: records, what one sees, and what stands in without a network."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from tiny_lab import TINY, a_job

from virtualgrad.lab import progress
from virtualgrad.lab.data import DataUnavailableError, UnknownDataError
from virtualgrad.lab.networks import MLP
from virtualgrad.lab.record import Record
from virtualgrad.lab.reproduce import DATA, load_data, make_runs


def text(console):
    return console.file.getvalue()


def test_every_optimizer_with_every_seed_leaves_a_record(tmp_path, console):
    job = a_job(tmp_path, seeds=(0, 1, 2), optimizers=("sgd", "svgd"), at_once=2)
    records = make_runs(job, console)
    assert [(r.optimizer, r.seed) for r in records] == [
        (optimizer, seed) for optimizer in ("sgd", "svgd") for seed in (0, 1, 2)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(r.file_name for r in records)
    for record in records:
        assert Record.load(tmp_path / record.file_name) == record
        assert record.finished and record.curve.step == [10, 20, 30, 40]
    assert "\n\n" not in text(console) and "steps/s" not in text(console)
    assert "Tiny, sgd, seeds 0, 1: last error" in text(console)


def unavailable():
    raise DataUnavailableError("nothing [here] answers")


def test_without_mnist_the_digits_stand_in_and_it_is_said(tmp_path, console, monkeypatch):
    monkeypatch.setitem(DATA, "mnist", unavailable)
    recipe = replace(TINY, network=MLP, data="mnist", batch_size=32, steps=30)
    (record,) = make_runs(a_job(tmp_path, recipe=recipe), console)
    assert "nothing [here] answers" in text(console) and "NOT comparable" in text(console)
    assert record.data["name"] == "digits (embedded)" and "not MNIST" in record.data["source"]
    assert Record.load(tmp_path / record.file_name) == record
    assert record.final_error < 60


def test_digits_are_enlarged_to_the_size_of_mnist(console, monkeypatch):
    monkeypatch.setitem(DATA, "mnist", unavailable)
    digits = load_data("mnist", console)
    assert digits.train_images.shape == (1_297, 1, 28, 28)
    assert digits.test_images.shape == (500, 1, 28, 28)
    assert digits.train_images.dtype == torch.uint8 and digits.train_images.max() > 200


def test_nothing_stands_in_for_cifar10(console, monkeypatch):
    monkeypatch.setitem(DATA, "cifar10", unavailable)
    with pytest.raises(DataUnavailableError, match="answers"):
        load_data("cifar10", console)


def test_unknown_data_is_named(console):
    with pytest.raises(UnknownDataError, match=r"'svhn'.*mnist, cifar10"):
        load_data("svhn", console)


def test_lines_off_a_terminal(tmp_path, console, monkeypatch):
    """Not before a while has passed, and with speed and time left."""
    monkeypatch.setattr("virtualgrad.lab.engine.SECONDS_UNWATCHED", 0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    make_runs(a_job(tmp_path), console)
    lines = text(console).splitlines()
    assert lines[0].startswith("Tiny, svgd, seed 0: step 2 of 40, ") and "0:00:0" in lines[0]
    line = next(line for line in lines if "step 11 of" in line)
    assert all(word in line for word in ("error", "loss", "steps/s", "left"))
    assert all(lines)


def test_a_live_display_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("virtualgrad.lab.engine.SECONDS_UNWATCHED", 0)
    console = Console(file=StringIO(), width=160, force_terminal=True)
    make_runs(a_job(tmp_path), console)
    assert "Tiny, svgd, seed 0" in text(console) and "40/40" in text(console)
