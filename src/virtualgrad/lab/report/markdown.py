"""The tables in Markdown, for the README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from virtualgrad.lab.report.content import Content, content_of
from virtualgrad.lab.report.sections import Section
from virtualgrad.lab.report.tables import Entry, Table

DIGITS_WARNING = (
    "These results are on the small embedded digits set, because the paper's data was not "
    "available. They are NOT comparable with the paper."
)


def markdown(sections: Sequence[Section]) -> str:
    """All tables with their verdicts; a blank line between blocks."""
    text = written([content_of(section) for section in sections])
    warned = any(section.on_digits for section in sections)
    return f"> **Warning:** {DIGITS_WARNING}\n\n{text}" if warned else text


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


def readme_blocks(sections: Sequence[Section]) -> dict[str, str]:
    """Name of a place in a README -> what belongs there: the paper's tables, the readings."""
    kinds = {
        "tables": [section for section in sections if not section.of_readings],
        "readings": [section for section in sections if section.of_readings],
    }
    return {name: markdown(found) for name, found in kinds.items() if found}


def _table(table: Table) -> str:
    lines = [
        _line(["", *table.columns]),
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
