"""The measured tables inside a README, each kind between two comments that mark its place."""

from collections.abc import Mapping
from pathlib import Path

from virtualgrad.lab.record import RecordError, write_safely


def marks(name: str) -> tuple[str, str]:
    """The lines that a place of this name begins and ends with."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def update_readme(readme: Path, blocks: Mapping[str, str]) -> None:
    """Put tables between the marks of a README.

    Args:
        readme: A Markdown file with the two lines of :func:`marks` for every block.
        blocks: Name of a place -> the text that belongs there.

    Raises:
        RecordError: The README has no such place; nothing was changed.
    """
    text = readme.read_text(encoding="utf-8")
    for name, content in blocks.items():
        begin, end = marks(name)
        before, begins, rest = text.partition(begin)
        _, ends, after = rest.partition(end)
        if not begins or not ends:
            raise RecordError.of(
                given=f"{readme.name} without a place for the {name}",
                allowed=f"a file with the lines {begin} and {end}",
                todo="add the two lines where they are to stand",
            )
        text = f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"
    write_safely(readme, text)
