"""The site builds without a warning, hangs together, needs no network, and leaves no name out."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import griffe
import pytest
from pages import PAGES, ROOT

import virtualgrad
from virtualgrad import errors, operators

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


class Page(HTMLParser):
    """What a page links to, loads, and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.without_alt: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of a tag."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if "src" in given or (tag == "link" and given.get("rel") != "canonical"):
            self.loads.append(given.get("src") or given["href"])
        if tag == "img" and not given.get("alt"):
            self.without_alt.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the site, read."""
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        name = page.relative_to(ROOT / "docs")
        assert (site / name.with_suffix(".html")).exists()
        assert name.as_posix() in navigation


def test_links_lead_somewhere(pages: dict[Path, Page]) -> None:
    wrong = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].ids if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in known):
                wrong.append(f"{path.name}: {link}")
    assert not wrong


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {load for page in pages.values() for load in page.loads}
    assert not [load for load in loaded if urlsplit(load).netloc]
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8"))


def test_pictures_have_words_and_are_small(site: Path, pages: dict[Path, Page]) -> None:
    assert not [alt for page in pages.values() for alt in page.without_alt]
    pictures = [path for path in (site / "images").rglob("*") if path.is_file()]
    assert len(pictures) >= 10
    assert max(path.stat().st_size for path in pictures) < 200_000


def test_measured_tables_are_on_the_site(site: Path) -> None:
    start, evidence = (
        (site / name).read_text(encoding="utf-8") for name in ("index.html", "reproducing.html")
    )
    assert "paper's lowest" in start  # included from the README
    assert "lowest error, %" in evidence and "r shared over positions" in evidence
    for page in site.rglob("*.html"):
        assert "<!-- include" not in page.read_text(encoding="utf-8")


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page]) -> None:
    known = set().union(*(page.ids for page in pages.values()))
    public = [f"virtualgrad.{name}" for name in virtualgrad.__all__]
    public += [f"virtualgrad.operators.{name}" for name in operators.__all__]
    public += [
        f"virtualgrad.errors.{name}"
        for name, value in vars(errors).items()
        if name[:1].isupper() and isinstance(value, type)
    ]
    assert len(public) > 35
    assert not [name for name in public if name not in known]


@pytest.mark.skipif(BROWSER is None, reason="needs the program chromium or google-chrome")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["five-minutes", "mathematics", "performance"])
def test_every_formula_is_set(site: Path, name: str, tmp_path: Path) -> None:
    page = site / f"{name}.html"
    formulas = page.read_text(encoding="utf-8").count('class="arithmatex"')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path}"]
    done = subprocess.run(
        [str(BROWSER), *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=True,
    )
    assert formulas > 0
    assert done.stdout.count('class="katex"') == formulas
    assert "katex-error" not in done.stdout
    assert "#cc0000" not in done.stdout  # KaTeX's colour for a command that it does not know


# ---------------------------------------------------------------- what the build refuses


@pytest.fixture
def hooks() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/tools/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


SOURCES = {
    "__init__.py": '''"""The package."""
from virtualgrad.thing import Thing, silent

__all__ = ["Thing", "silent"]
''',
    "operators.py": '"""Operators."""\n__all__ = []\n',
    "errors.py": '"""Errors."""\n\n\nclass Wrong(Exception):\n    pass\n',
    "thing.py": '''
class Base:
    def inherited(self):
        """Documented."""

    def bare(self):
        return 1


class Thing(Base):
    """Documented."""

    field: int = 0

    @property
    def size(self):
        return 0

    def inherited(self):
        """Documented again."""

    def _private(self):
        return 2


def silent():
    return 3
''',
}


def test_a_public_name_without_a_docstring_is_a_complaint(
    hooks: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "virtualgrad"
    folder.mkdir()
    for name, source in SOURCES.items():
        (folder / name).write_text(source, encoding="utf-8")
    package = griffe.load("virtualgrad", search_paths=[str(tmp_path)], resolve_aliases=True)
    assert {complaint.split()[0] for complaint in hooks.undocumented(package)} == {
        "virtualgrad.silent",
        "virtualgrad.Thing.size",
        "virtualgrad.Thing.bare",
        "virtualgrad.errors.Wrong",
    }


def test_a_missing_place_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(LookupError, match="no place that is marked as nothing"):
        hooks.section("README.md", "nothing")
