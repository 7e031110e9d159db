"""Snapshots: kept while a run is unfinished, refused when they do not fit."""

from dataclasses import replace

import pytest
import torch
from tiny_lab import TINY, tiny_data

from virtualgrad.files import write_sealed
from virtualgrad.lab.run import Run, Setup
from virtualgrad.lab.snapshot import drop_snapshot, resumed, save_snapshot, snapshot_path


def make(recipe=TINY, name="tiny"):
    return Run(recipe, "svgd", 0, tiny_data(name=name), Setup(torch.device("cpu")))


@pytest.fixture
def saved(tmp_path):
    """A run after three steps, and its snapshot."""
    run = make()
    run.batches.seek(0)
    for _ in range(3):
        run.train_step()
    run.advance(3)
    save_snapshot(run, tmp_path)
    return run


def is_new(run):
    return run.step == 0 and all(
        map(torch.equal, run.model.parameters(), make().model.parameters())
    )


def test_a_run_goes_on_where_it_was(saved, tmp_path):
    run, text = resumed(make, tmp_path)
    assert (run.step, text) == (3, "goes on at step 3")
    assert all(map(torch.equal, run.model.parameters(), saved.model.parameters()))


def test_without_a_snapshot_it_starts(tmp_path):
    run, text = resumed(make, tmp_path)
    assert is_new(run) and text == "starts anew"


def test_every_truncation_starts_anew_and_says_so(saved, tmp_path):
    path = snapshot_path(saved, tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 15):
        path.write_bytes(whole[:length])
        run, text = resumed(make, tmp_path)
        assert is_new(run) and "starts anew: tiny-svgd-seed0.pt is damaged" in text


def test_a_changed_byte_starts_anew_and_says_so(saved, tmp_path):
    """In the middle of the weights, where nothing but a checksum can tell."""
    path = snapshot_path(saved, tmp_path)
    content = bytearray(path.read_bytes())
    weights = saved.model[0].weight.detach().numpy().tobytes()
    content[content.index(weights) + 40] ^= 1
    path.write_bytes(content)
    run, text = resumed(make, tmp_path)
    assert is_new(run) and "damaged" in text


@pytest.mark.parametrize("key", ["optimizer", "losses", "identity"])
def test_a_state_that_fits_in_part_only_starts_anew(saved, tmp_path, key):
    path = snapshot_path(saved, tmp_path)
    state = torch.load(path, weights_only=True)
    del state[key]
    write_sealed(path, state)
    run, text = resumed(make, tmp_path)
    assert is_new(run) and "does not fit (KeyError)" in text


@pytest.mark.parametrize(
    "other", [lambda: make(replace(TINY, l1=0.5)), lambda: make(name="digits")]
)
def test_other_settings_or_data_start_anew(saved, tmp_path, other):
    run, text = resumed(other, tmp_path)
    assert run.step == 0 and "has other settings or data" in text


def test_dropping_leaves_nothing(saved, tmp_path):
    (tmp_path / ".tiny-svgd-seed0.pt.12ab").write_text("left by a kill")
    (tmp_path / ".tiny-svgd-seed0.json.12ab").write_text("left by a kill")
    drop_snapshot(saved, tmp_path)
    drop_snapshot(saved, tmp_path)
    assert list(tmp_path.iterdir()) == []
