"""The tables of what a step costs show what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import README, ROOT

from virtualgrad.lab.bench.markdown import PLACE, SHORT, bench_blocks
from virtualgrad.lab.bench.rows import load_environment, load_rows
from virtualgrad.lab.report.readme import marks

RECORDS = ROOT / "results/bench"


@pytest.mark.parametrize(
    ("page", "place"), [(README, SHORT), (ROOT / "docs/performance.md", PLACE)]
)
def test_the_pages_show_the_record(page: Path, place: str) -> None:
    text = page.read_text(encoding="utf-8")
    (found, content), *others = bench_blocks(
        load_rows(RECORDS), load_environment(RECORDS), text
    ).items()
    assert found == place and not others
    begin, end = marks(place)
    assert f"{begin}\n\n{content.strip()}\n\n{end}" in text
