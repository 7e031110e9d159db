"""What a report says of a section, whatever language it is then written in."""

from __future__ import annotations

from dataclasses import dataclass

from virtualgrad.lab.report import readings
from virtualgrad.lab.report.sections import Section
from virtualgrad.lab.report.tables import Table, table_of
from virtualgrad.lab.report.verdict import Finding, verdict

NOTE = "Errors are mean ± sample standard deviation over seeds."


@dataclass(frozen=True)
class Content:
    """A table and what it shows.

    Attributes:
        table: The numbers.
        findings: What they show, in words.
        note: How to read them.
        open_runs: Runs that are unfinished or missing, in a line each.
    """

    table: Table
    findings: list[Finding]
    note: str = NOTE
    open_runs: tuple[str, ...] = ()


def content_of(section: Section) -> Content:
    """A section as a table like the paper's; readings as a comparison with the released one."""
    if section.of_readings:
        table, findings = readings.readings_table(section), readings.readings_verdict(section)
        return Content(table, findings, readings.NOTE, section.open_runs)
    return Content(table_of(section), verdict(section), open_runs=section.open_runs)
