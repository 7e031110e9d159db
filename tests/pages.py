"""What the tests of the documentation share: its pages, and the code on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "assets" not in path.parts)

FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A Python block, and what the page says that it prints (a text block right behind it)."""

    page: str
    line: int
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """The Python blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    page = path.relative_to(ROOT).as_posix()
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found["code"], found["output"])
        for found in FENCE.finditer(text)
    ]
