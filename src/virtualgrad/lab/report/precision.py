"""Number formats side by side: the same runs in bfloat16 and without, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from virtualgrad.lab.record import Record, RecordError
from virtualgrad.lab.report.content import Content
from virtualgrad.lab.report.differences import beyond_noise, difference_entry, paired
from virtualgrad.lab.report.sections import Cell, Section, gather
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.report.tables import Entry, Row, Table, error_entry, signed, time_entry
from virtualgrad.lab.report.verdict import Finding

LOW = "bfloat16"
NOTE = (
    "Errors are mean ± sample standard deviation over seeds. A difference is bfloat16 minus the "
    "other format, seed by seed, ± its standard error; it stands out where zero lies outside its "
    "95 % interval (Student's t)."
)
Pair = tuple[Cell, Cell]
"""The same runs in bfloat16 and without it."""


def precision_contents(records: Sequence[Record], others: Sequence[Record]) -> list[Content]:
    """Compare the runs that were made both with and without bfloat16 autocast.

    Args:
        records: Records of runs, finished or not.
        others: Those of another folder. Which of the two is in bfloat16 does not matter.

    Raises:
        RecordError: No finished run is there in both formats, or it differs in something else.
    """
    known = {(s.name, cell.optimizer): cell for s in gather(others) for cell in s.cells}
    contents = []
    for section in gather(records):
        found = [(cell, known.get((section.name, cell.optimizer))) for cell in section.cells]
        pairs = [pair for one, other in found if other and (pair := _pair(one, other))]
        if pairs:
            contents.append(_content(section, pairs))
    if not contents:
        raise RecordError.of(
            given="two folders without a finished run in common, once in bfloat16 and once not",
            allowed="folders with the same recipe, optimizer and seed in two number formats",
            todo="repeat one folder's runs by `virtualgrad reproduce`, with or without --amp",
        )
    return contents


def _pair(one: Cell, other: Cell) -> Pair | None:
    seeds = {run.seed for run in one.runs} & {run.seed for run in other.runs}
    if not seeds or _is_low(one) == _is_low(other):
        return None
    one, other = (
        replace(cell, runs=tuple(run for run in cell.runs if run.seed in seeds))
        for cell in (one, other)
    )
    _check_alike(one.runs[0], other.runs[0])
    return (one, other) if _is_low(one) else (other, one)


def _is_low(cell: Cell) -> bool:
    return bool(cell.runs[0].settings.get("amp"))


def _check_alike(one: Record, other: Record) -> None:
    """A setting that only one of them has is of another version, and says nothing."""
    first, second = (
        {**run.settings, "data": run.data.get("name"), "last step": run.curve.step[-1]}
        for run in (one, other)
    )
    both = sorted(first.keys() & second.keys() - {"amp"})
    differences = [key for key in both if first[key] != second[key]]
    if differences:
        listed = "; ".join(f"{key} is {first[key]!r} and {second[key]!r}" for key in differences)
        raise RecordError.of(
            given=f"two runs {one.file_name} that differ in more than their format: {listed}",
            allowed="runs with the same settings but for amp",
            todo="repeat one of them with the other's settings",
        )


def _content(section: Section, pairs: Sequence[Pair]) -> Content:
    full = _full_format(pairs[0][1])
    rows = tuple(row for pair in pairs for row in _rows(*pair))
    table = Table(section.title, (LOW, full, "difference"), rows)
    return Content(table, [_finding(*pair, full) for pair in pairs], NOTE)


def _full_format(cell: Cell) -> str:
    """On a GPU the lab lets products of float32 run in TF32."""
    return "TF32" if cell.runs[0].settings.get("device") == "cuda" else "float32"


def _rows(low: Cell, full: Cell) -> tuple[Row, ...]:
    last, lowest = _differences(low, full)
    rows = {
        "last error, %": (error_entry(low.final), error_entry(full.final), difference_entry(last)),
        "lowest error, %": (
            error_entry(low.lowest),
            error_entry(full.lowest),
            difference_entry(lowest),
        ),
        "ms per step": (time_entry(low), time_entry(full), Entry()),
    }
    return tuple(Row(f"{low.title}: {name}", entries) for name, entries in rows.items())


def _differences(low: Cell, full: Cell) -> tuple[Spread | None, Spread | None]:
    """Of the last error, and of the lowest."""
    return (
        paired(low, full, lambda run: run.final_error),
        paired(low, full, lambda run: run.lowest_error),
    )


def _finding(low: Cell, full: Cell, other: str) -> Finding:
    last, lowest = _differences(low, full)
    if not (last and last.interval and lowest and lowest.interval):
        return Finding(f"{low.title}: with one seed, chance cannot be told from merit.")
    worse = any(beyond_noise(found) and found.mean > 0 for found in (last, lowest))
    return Finding(
        f"{low.title}: {LOW} in place of {other} changes the last error by {_told(last)} "
        f"and the lowest by {_told(lowest)}: {'a loss' if worse else 'no loss'} beyond noise "
        f"({len(last.values)} seeds).",
        holds=not worse,
    )


def _told(difference: Spread) -> str:
    low, high = difference.interval or (difference.mean, difference.mean)
    return f"{signed(difference.mean)} points (95 % interval {signed(low)} to {signed(high)})"
