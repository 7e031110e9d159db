"""The tables beside BackPACK, SINGD and Opacus show what the probes have recorded."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from pages import ROOT

from virtualgrad.lab.report.readme import marks


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peers_table", ROOT / "results/peers/table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_record(table: ModuleType) -> None:
    record = table.load()
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    for place, content in (
        (table.PLACE, table.full_table(record)),
        (table.PLACE_SHORT, table.short_table(record)),
    ):
        begin, end = marks(place)
        assert f"{begin}\n\n{content.strip()}\n\n{end}" in page


def test_the_record_is_complete(table: ModuleType) -> None:
    record = table.load()
    assert {row["feature"] for row in record["features"]} == set(table.OURS)
    assert {f for features in table.SHORT.values() for f in features} <= set(table.OURS)
    for row in record["features"]:
        for name in table.NAMES:
            assert row[name]["verdict"] in table.VERDICTS
            assert row[name]["saw"]


def test_what_we_say_of_ourselves_has_a_test(table: ModuleType) -> None:
    for feature, (verdict, path) in table.OURS.items():
        assert (ROOT / path).exists(), feature
        assert verdict == "yes" or feature in table.NOTES


def test_a_line_that_sums_up_what_differs_is_partial(table: ModuleType) -> None:
    features = [
        {"feature": name, "title": name}
        | {library: {"verdict": "yes", "saw": "x"} for library in table.NAMES}
        for name in table.OURS
    ]
    tied = next(row for row in features if row["feature"] == "tied")
    tied["singd"] = {"verdict": "no", "saw": "a|b"}
    record = {
        "date": "2026-01-01",
        "torch": "2",
        "versions": dict.fromkeys(table.NAMES, "1"),
        "features": features,
    }
    assert "| reused and tied layers | yes | partial | yes | yes |" in table.short_table(record)
    full = table.full_table(record)
    assert "| tied | yes | no (2) | yes | yes |" in full
    assert "\n2. SINGD: a\\|b\n" in full
