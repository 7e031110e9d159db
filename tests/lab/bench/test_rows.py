"""The files: their schema, rows that come later, and folders that cannot be added to."""

import json

import pytest

from virtualgrad.lab.bench.rows import SCALING, Results, Row, load_environment, load_rows
from virtualgrad.lab.bench.run import environment_of
from virtualgrad.lab.record import RecordError

FIELDS = [
    *("model", "mode", "dtype", "optimizer", "batch_size", "parameters"),
    *("ms", "ms_spread", "ratio_to_sgd", "ratio_spread", "ratio_quartiles"),
    *("peak_bytes", "peak_ratio_to_sgd", "state_bytes", "state_per_parameter"),
    *("extra_bytes", "floor_ratio", "flops", "steps_per_block", "error"),
]


@pytest.fixture
def environment(setup):
    return environment_of(setup)


def test_schema(rows, environment, tmp_path):
    Results(tmp_path, environment).add(rows)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [list(row) for row in written] == [FIELDS] * len(rows)
    assert written[-1]["error"] == "OutOfMemoryError: too <big>" and written[-1]["ms"] is None
    known = json.loads((tmp_path / "environment.json").read_text())
    assert {"device", "torch", "commit", "date", "settings"} <= known.keys()
    assert known["settings"]["bandwidth"] == 1e9 and known["settings"]["rounds"] == 2
    assert load_environment(tmp_path) == known
    assert [row.key for row in load_rows(tmp_path)] == [row.key for row in rows]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["environment.json", "summary.json"]


def test_rows_measured_again_replace_the_old_ones(rows, make_row, environment, tmp_path):
    Results(tmp_path, environment).add(rows)
    later = Results(tmp_path, environment)
    later.add([make_row(ms=9.0), make_row(model="vgg")])
    assert [row.model for row in later.rows] == ["mlp"] * 6 + ["vgg"]
    assert load_rows(tmp_path)[0].ms == 9.0 and load_rows(tmp_path)[1].ms == 3.0
    Results(tmp_path, environment, SCALING).add(rows[:1])
    assert len(load_rows(tmp_path, SCALING)) == 1 and len(load_rows(tmp_path)) == 7


def test_rows_of_another_machine_are_refused(rows, environment, tmp_path):
    Results(tmp_path, environment).add(rows)
    with pytest.raises(RecordError, match=r"measured with device .*another folder by --out"):
        Results(tmp_path, environment | {"device": "NVIDIA H200"})
    assert len(load_rows(tmp_path)) == len(rows)


@pytest.mark.parametrize("content", ["{", '[{"no": 1}]', "[3]"])
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(RecordError, match=r"summary\.json, which cannot be read"):
        load_rows(tmp_path)


def test_a_row_is_known_by_its_key(make_row):
    assert make_row().key == ("mlp", "eager", "fp32", "sgd")
    assert Row("a", "b", "c", "d", 1, 2).error is None
