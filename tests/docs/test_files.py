"""The pages as files, as GitHub shows them: no hook has filled them in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, README, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r"^<!-- include: (\S+) \S+ -->\n(.*)$", re.MULTILINE)


def links_in(text: str) -> list[str]:
    """What links and pictures lead to within the repository."""
    found = [link.partition("#")[0] for link in LINK.findall(CODE.sub("", text))]
    return [link for link in found if link and "://" not in link]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = links_in(page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


def test_a_table_that_is_elsewhere_is_linked() -> None:
    """Where the site includes a table of the README, the file has a link to it."""
    found = 0
    for page in PAGES:
        for source, fallback in INCLUDE.findall(page.read_text(encoding="utf-8")):
            found += 1
            linked = [(page.parent / link).resolve() for link in links_in(fallback)]
            assert linked == [ROOT / source], f"{page.name}: {source}"
    assert found >= 1


def test_the_readme_says_how_to_build_the_site() -> None:
    assert "`make docs`" in README.read_text(encoding="utf-8")
