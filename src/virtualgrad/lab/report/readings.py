"""The readings of SVGD side by side: each against the released one, with what it costs."""

from __future__ import annotations

from collections.abc import Callable

from virtualgrad.lab.readings import LEFT_OUT, READINGS
from virtualgrad.lab.record import Record
from virtualgrad.lab.report.differences import beyond_noise, difference_entry, paired
from virtualgrad.lab.report.sections import Cell, Section
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.report.tables import Entry, Row, Table, error_entry, time_entry
from virtualgrad.lab.report.verdict import Finding

COLUMNS = ("last error, %", "change", "lowest error, %", "change", "ms", "r")
HIGHER = "Higher last error than the released reading"
LOWER = "Lower last error than the released reading"
ALIKE = "Not to be told from the released reading with these seeds"
UNKNOWN = "Too few seeds in common with the released reading to tell"
NUMBER = 4  # bytes of a number of r: it is kept in float32

NOTE = (
    "Errors are mean ± sample standard deviation over seeds. A change is that from the released "
    "reading in points, seed by seed, ± its standard error; it stands out where zero lies outside "
    "its 95 % interval (Student's t; one of twenty does so by chance). Per sample is the released "
    "reading in other units: what it differs by is rounding, grown in training. ms is the time of "
    "a training step; r is how many numbers SVGD keeps, 4 bytes each."
)


def readings_table(section: Section) -> Table:
    """Lay out a section of readings: a row for each, what was measured in columns."""
    return Table(
        title=section.title,
        columns=COLUMNS,
        rows=tuple(Row(cell.title, _entries(section.reference, cell)) for cell in section.cells),
    )


def readings_verdict(section: Section) -> list[Finding]:
    """Say which readings differ from the released one by more than noise, by the last error."""
    return [
        *_differences(section),
        *(
            Finding(f"Left out: {READINGS[name]}; {why}.")
            for name, why in LEFT_OUT.get(section.recipe, {}).items()
        ),
        *(Finding(f"Not comparable with the paper: {caveat}.") for caveat in section.caveats),
    ]


def _entries(base: Cell | None, cell: Cell) -> tuple[Entry, ...]:
    return (
        error_entry(cell.final),
        _difference(base, cell, _final),
        error_entry(cell.lowest),
        _difference(base, cell, lambda run: run.lowest_error),
        time_entry(cell),
        Entry(f"{cell.state_bytes // NUMBER:,}"),
    )


def _difference(base: Cell | None, cell: Cell, value: Callable[[Record], float]) -> Entry:
    if base is None or cell is base:
        return Entry()
    return difference_entry(paired(cell, base, value))


def _differences(section: Section) -> list[Finding]:
    base = section.reference
    if base is None:
        return [Finding("The released reading has no finished run: nothing to compare with.")]
    told: dict[str, list[str]] = {HIGHER: [], LOWER: [], ALIKE: [], UNKNOWN: []}
    for cell in section.cells:
        if cell is not base:
            difference = paired(cell, base, _final)
            told[_kind(difference)].append(f"{cell.title} ({difference_entry(difference)})")
    return [Finding(f"{kind}: {'; '.join(cells)}.") for kind, cells in told.items() if cells]


def _kind(difference: Spread | None) -> str:
    if difference is None or difference.interval is None:
        return UNKNOWN
    if not beyond_noise(difference):
        return ALIKE
    return HIGHER if difference.mean > 0 else LOWER


def _final(run: Record) -> float:
    return run.final_error
