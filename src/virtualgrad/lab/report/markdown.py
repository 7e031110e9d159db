"""The tables in Markdown, for the README and the pages of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from virtualgrad.lab.report.content import Content, content_of
from virtualgrad.lab.report.readme import marks
from virtualgrad.lab.report.sections import Section
from virtualgrad.lab.report.short import short_note, short_table
from virtualgrad.lab.report.tables import Entry, Table

PLACE, SHORT, READINGS = "tables", "tables-short", "readings"
"""Names of the places in a Markdown file: the paper's tables, one in their place, the readings."""

DIGITS_WARNING = (
    "These results are on the small embedded digits set, because the paper's data was not "
    "available. They are NOT comparable with the paper."
)


def markdown(sections: Sequence[Section]) -> str:
    """All tables with their verdicts; a blank line between blocks."""
    return _warned(sections, written([content_of(section) for section in sections]))


def short_markdown(sections: Sequence[Section]) -> str:
    """One table for all sections, and how to read it."""
    table = short_table(sections)
    blocks = [_table(table, table.title), _plain(short_note(sections))]
    open_runs = [line for section in sections for line in section.open_runs]
    if open_runs:
        blocks.append(f"Not finished: {_plain('; '.join(open_runs))}.")
    return _warned(sections, "\n\n".join(blocks) + "\n")


def written(contents: Iterable[Content]) -> str:
    """Tables with what they show, and at the end, once, how to read them."""
    blocks: list[str] = []
    notes: dict[str, None] = {}
    for content in contents:
        blocks += [f"### {_plain(content.table.title)}", _table(content.table)]
        blocks.append("\n".join(f"- {_plain(finding.text)}" for finding in content.findings))
        if content.open_runs:
            blocks.append(f"Not finished: {_plain('; '.join(content.open_runs))}.")
        notes[content.note] = None
    return "\n\n".join([*blocks, *notes]) + "\n"


def readme_blocks(sections: Sequence[Section], text: str) -> dict[str, str]:
    """What belongs into a Markdown file, by its places.

    Args:
        sections: What was measured.
        text: What the file has now: where there is a place for the short table, that is what it
            gets of the paper's tables.
    """
    paper = [section for section in sections if not section.of_readings]
    readings = [section for section in sections if section.of_readings]
    blocks = {}
    if paper and marks(SHORT)[0] in text:
        blocks[SHORT] = short_markdown(paper)
    elif paper:
        blocks[PLACE] = markdown(paper)
    if readings:
        blocks[READINGS] = markdown(readings)
    return blocks


def _warned(sections: Sequence[Section], text: str) -> str:
    warned = any(section.on_digits for section in sections)
    return f"> **Warning:** {DIGITS_WARNING}\n\n{text}" if warned else text


def _table(table: Table, corner: str = "") -> str:
    lines = [
        _line([corner, *table.columns]),
        _line(["---", *("---:" for _ in table.columns)]),
        *(_line([row.label, *map(_entry, row.entries)]) for row in table.rows),
    ]
    return "\n".join(lines)


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(map(_plain, texts))} |"


def _plain(text: str) -> str:
    """Keep names from being read as Markdown or HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("$", "\\$")


def _entry(entry: Entry) -> str:
    return f"**{entry}**" if entry.best else str(entry)
