"""The measured tables inside a README, between two comments that mark their place."""

from pathlib import Path

from virtualgrad.lab.record import RecordError, write_safely

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def update_readme(readme: Path, tables: Path) -> None:
    """Put the tables of a report between the two marks of a README.

    Args:
        readme: A Markdown file with the lines ``BEGIN`` and ``END``.
        tables: The report's ``tables.md``.

    Raises:
        RecordError: The README has no such place.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RecordError.of(
            given=f"{readme.name} without a place for the tables",
            allowed=f"a file with the lines {BEGIN} and {END}",
            todo="add the two lines where the tables are to stand",
        )
    content = tables.read_text(encoding="utf-8").strip()
    write_safely(readme, f"{before}{BEGIN}\n\n{content}\n\n{END}{after}")
