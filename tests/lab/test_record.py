"""A record comes back as it was; a damaged one is named; a file is always the old or the new."""

import json
import os
import stat

import pytest
import torch

from virtualgrad.files import sweep
from virtualgrad.lab import record as module
from virtualgrad.lab.record import (
    Curve,
    Record,
    RecordError,
    environment,
    load_records,
    write_safely,
)


def a_record(**changes):
    fields = {
        "recipe": "mlp",
        "optimizer": "svgd",
        "seed": 3,
        "settings": {"lr": [0.1, 0.01], "scale": 0.1},
        "environment": {"torch": "2"},
        "data": {"name": "MNIST", "source": "größer"},
        "curve": Curve([10, 20, 30], [2.0, 1.0, 0.5], [2.1, 1.1, 0.6], [9.0, 3.0, 4.0]),
        "ms_per_step": 0.1 + 0.2,
        "state_bytes": 1960,
        "finished": True,
    }
    return Record(**{**fields, **changes})


def test_round_trip(tmp_path):
    record = a_record()
    path = record.save(tmp_path / "new" / "folder")
    assert path.name == "mlp-svgd-seed3.json"
    assert Record.load(path) == record
    assert (record.final_error, record.lowest_error) == (4.0, 3.0)


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for seed in (2, 0, 1):
        a_record(seed=seed).save(tmp_path)
    write_safely(tmp_path / "summary.json", "{}")
    (tmp_path / ".mlp-svgd-seed0.json.0a1b").write_text("left by a kill")
    assert [record.seed for record in load_records(tmp_path)] == [0, 1, 2]


def test_an_empty_or_missing_folder_is_named(tmp_path):
    with pytest.raises(RecordError, match="empty', which does not exist"):
        load_records(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="empty', without records of runs"):
        load_records(tmp_path / "empty")


def test_every_truncation_is_refused_by_name(tmp_path):
    path = a_record().save(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole.rstrip()), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"mlp-svgd-seed3\.json, which cannot be read"):
            Record.load(path)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b'"text"', b"null", b"\xff\xfe", b'{"curve": {"wrong": []}}']
)
def test_other_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / "x-seed0.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"x-seed0\.json, which cannot be read"):
        Record.load(path)


def test_another_format_is_refused_by_name(tmp_path):
    path = a_record().save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(RecordError, match=r"mlp-svgd-seed3\.json of format 99; allowed: format 1"):
        Record.load(path)


@pytest.mark.parametrize(
    ("content", "expected"), [("größer α", "größer α".encode()), (b"\x00\xff", b"\x00\xff")]
)
def test_texts_are_utf8_and_bytes_stay(tmp_path, content, expected):
    write_safely(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_a_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_safely(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where):
    def fail(*_):
        raise OSError("disk full")

    path = tmp_path / "file"
    write_safely(path, "old")
    monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="disk full"):
        write_safely(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_a_kill_left_is_swept_and_nothing_else(tmp_path):
    for name in (".a.json.12ab", "a.json", ".b.json.12ab"):
        (tmp_path / name).write_text("")
    sweep(tmp_path / "a.json")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".b.json.12ab", "a.json"]


def test_environment_is_plain_data(monkeypatch):
    found = environment(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__ and found["cuda"] is None and found["date"]


def test_environment_without_git(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(module.subprocess, "run", missing)
    assert environment(torch.device("cpu"))["commit"] is None
