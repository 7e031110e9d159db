"""What the build of the site does beyond Markdown.

* A page that is still to be written may stand in the navigation already.
* What stands between ``<!-- include: README.md tables-short -->`` and ``<!-- include: end -->``
  gives way to what that file has between its comments ``<!-- tables-short: begin -->`` and
  ``<!-- tables-short: end -->``: measured tables are written once. Who reads the page as a file
  sees what stands there, a link.
* Pictures that the evidence keeps under ``results`` become part of the site. Pages name them by
  their place in the repository, ``../results/...``, so that they show in the file, too.
* A public name without a docstring, or on no page of the reference, is a warning: it fails a strict
  build.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

log = logging.getLogger("mkdocs.hooks.virtualgrad")

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(
    r"^<!-- include: (\S+) (\S+) -->\n(?:(?!<!--).*\n)*<!-- include: end -->$", re.MULTILINE
)
PICTURE = re.compile(r"\]\(\.\./(results/\S+\.png)\)")
PUBLIC = ("virtualgrad", "virtualgrad.operators", "virtualgrad.errors")


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of the evidence."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the tests read this file without it

    for picture in sorted(ROOT.glob("results/*/*.png")):
        uri = f"images/results/{picture.parent.name}/{picture.name}"
        files.append(File.generated(config, uri, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what a page includes, and let its pictures be those of the site."""

    def included(line: re.Match[str]) -> str:
        try:
            return section(line[1], line[2])
        except LookupError as error:
            log.warning("%s: %s", page.file.src_uri, error)
            return ""

    return PICTURE.sub(r"](images/\1)", INCLUDE.sub(included, markdown))


def section(path: str, name: str) -> str:
    """What a file of the repository has between its marks of this name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    _, begins, rest = text.partition(f"<!-- {name}: begin -->")
    content, ends, _ = rest.partition(f"<!-- {name}: end -->")
    if not begins or not ends:
        raise LookupError(f"{path} has no place that is marked as {name}")
    return content.strip()


def on_env(env: Any, config: Any, **_: Any) -> Any:
    """Check the reference, now that all pages are made."""
    package = griffe.load("virtualgrad", search_paths=[str(ROOT / "src")], resolve_aliases=True)
    for complaint in undocumented(package):
        log.warning(complaint)
    references = config.plugins["autorefs"]
    for name in public_names(package):
        try:
            references.get_item_url(name)
        except KeyError:
            log.warning("%s is public, but on no page of the reference", name)
    return env


def public_names(package: Any) -> Iterator[str]:
    """Full names of everything that users may import."""
    for path in PUBLIC:
        module = package[path.partition(".")[2]] if "." in path else package
        names = module.exports or [
            name for name, member in module.classes.items() if not member.is_alias
        ]
        for name in sorted(map(str, names)):
            if f"{path}.{name}" not in PUBLIC:
                yield f"{path}.{name}"


def undocumented(package: Any) -> Iterator[str]:
    """A complaint for every public name, and public method of one, without a docstring."""
    for path in PUBLIC:
        module = package[path.partition(".")[2]] if "." in path else package
        if not module.has_docstring:
            yield f"{path} is public, but has no docstring"
    for path in public_names(package):
        found = package[path.partition(".")[2]]
        if not found.has_docstring:
            yield f"{path} is public, but has no docstring"
        if not found.is_class:
            continue
        for name, member in found.all_members.items():
            documented = member.has_docstring or not (
                member.is_function or "property" in member.labels
            )
            if not name.startswith("_") and not documented:
                yield f"{path}.{name} is public, but has no docstring"
