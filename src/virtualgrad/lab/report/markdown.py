"""The tables in Markdown, for the README."""

from __future__ import annotations

from collections.abc import Iterable

from virtualgrad.lab.report.sections import Section
from virtualgrad.lab.report.tables import Entry, Table, table_of
from virtualgrad.lab.report.verdict import verdict

DIGITS_WARNING = (
    "These results are on the small embedded digits set, because the paper's data was not "
    "available. They are NOT comparable with the paper."
)


def markdown(sections: list[Section]) -> str:
    """All tables with their verdicts; a blank line between blocks."""
    blocks = [f"> **Warning:** {DIGITS_WARNING}"] if any(s.on_digits for s in sections) else []
    for section in sections:
        blocks += [f"### {_plain(section.title)}", _table(table_of(section))]
        blocks.append("\n".join(f"- {_plain(finding.text)}" for finding in verdict(section)))
        if section.open_runs:
            blocks.append(f"Not finished: {_plain('; '.join(section.open_runs))}.")
    blocks.append("Errors are mean ± sample standard deviation over seeds.")
    return "\n\n".join(blocks) + "\n"


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
