"""The errors of every way side by side, and how far each lies from tuned settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from virtualgrad.lab.record import Record, RecordError
from virtualgrad.lab.report.content import Content
from virtualgrad.lab.report.differences import beyond_noise, difference_entry, paired
from virtualgrad.lab.report.sections import Cell
from virtualgrad.lab.report.tables import Entry, Row, Table, error_entry, plain_number
from virtualgrad.lab.report.verdict import Finding
from virtualgrad.lab.settings.files import Kept
from virtualgrad.lab.settings.ways import OWN, SWEPT, WAYS

COLUMNS = ("α", "s", "s·α", "last error, %", "from the paper's", "from the sweep's best")
DIVERGED = "diverged"

SETTINGS = (
    "α is the learning rate of the first phase; later ones keep the ratios of the optimizer that "
    "it comes from."
)
SEVERAL_SEEDS = (
    "Errors are mean ± sample standard deviation over seeds. The last two columns are differences "
    "in points, seed by seed, ± their standard error; one stands out where zero lies outside its "
    "95 % interval (Student's t)."
)
ONE_SEED = (
    "Errors are those of one seed, and the last two columns their differences in points; the dash "
    "stands for a deviation that only more seeds can tell."
)
SHARED = "Ways that find the same settings share runs."


def contents_of(kept: Sequence[Kept], records: Sequence[Record]) -> list[Content]:
    """A table for every recipe."""
    return [_content(each, [run for run in records if run.recipe == each.recipe]) for each in kept]


def _content(kept: Kept, records: Sequence[Record]) -> Content:
    cells = _cells(kept, records)
    of_way = {way: cells.get(column) for way, column in kept.columns.items()}
    means = [round(cell.final.mean, 2) for cell in cells.values() if not _blew_up(cell)]
    least = min(means, default=None)
    rows = tuple(
        Row(
            WAYS[each.way],
            (
                *map(Entry, _numbers(each.tuned.lr[0], each.tuned.options["scale"])),
                *_errors(of_way, each.way, kept, least),
            ),
        )
        for each in kept.found
    )
    seeds = {len(cell.runs) for cell in cells.values()}
    missing = tuple(
        f"{WAYS[way]}: no finished run"
        for way, column in kept.columns.items()
        if column not in cells and column not in kept.diverged
    )
    title = f"{kept.title}, settings that were not searched"
    note = f"{SETTINGS} {ONE_SEED if seeds == {1} else SEVERAL_SEEDS} {SHARED}"
    return Content(Table(title, COLUMNS, rows), _findings(kept, of_way, seeds), note, missing)


def _cells(kept: Kept, records: Sequence[Record]) -> dict[str, Cell]:
    settings = {kept.columns[each.way]: each.tuned for each in reversed(kept.found)}
    cells = {}
    for column, tuned in settings.items():
        runs = tuple(run for run in records if run.optimizer == column and run.finished)
        for run in runs:
            expected = (list(tuned.lr), tuned.options["scale"])
            if (run.settings["lr"], run.settings["scale"]) != expected:
                raise RecordError.of(
                    given=f"{run.file_name}, which was trained with other settings",
                    allowed=f"lr {expected[0]} and scale {expected[1]:g}, as {column} found them",
                    todo="delete the record, and run `virtualgrad suggest` again",
                )
        if runs and column not in kept.diverged:
            cells[column] = Cell(column, runs)
    return cells


def _numbers(lr: float, scale: float) -> tuple[str, str, str]:
    return plain_number(lr), plain_number(scale), plain_number(float(f"{lr * scale:.2g}"))


def _blew_up(cell: Cell) -> bool:
    """Whether a run left the finite numbers; a captured step does not say so."""
    return not all(math.isfinite(loss) for run in cell.runs for loss in run.curve.test_loss)


def _errors(
    of_way: dict[str, Cell | None], way: str, kept: Kept, least: float | None
) -> tuple[Entry, Entry, Entry]:
    cell = of_way[way]
    if kept.columns[way] in kept.diverged or (cell is not None and _blew_up(cell)):
        return Entry(DIVERGED), Entry(), Entry()
    if cell is None:
        return Entry(), Entry(), Entry()
    against = (_difference(cell, of_way.get(base)) for base in (OWN, SWEPT))
    return error_entry(cell.final, least), *against  # type: ignore[return-value]


def _difference(cell: Cell, base: Cell | None) -> Entry:
    if base is None or base is cell or _blew_up(base):
        return Entry()
    return difference_entry(paired(cell, base, lambda run: run.final_error))


def _findings(kept: Kept, of_way: dict[str, Cell | None], seeds: set[int]) -> list[Finding]:
    """How far the ways land from tuned settings, in words."""
    told = [Finding(f"Seeds of each: {', '.join(map(str, sorted(seeds))) or 'none'}.")]
    for base in (SWEPT, OWN):
        tuned = of_way.get(base)
        if tuned is None or _blew_up(tuned):
            continue
        others = {
            way: cell
            for way, cell in of_way.items()
            if way not in {OWN, SWEPT} and cell is not None and not _blew_up(cell)
        }
        told += _compared(others, tuned, WAYS[base])
    blown = [
        WAYS[way]
        for way, column in kept.columns.items()
        if column in kept.diverged or ((cell := of_way[way]) is not None and _blew_up(cell))
    ]
    if blown:
        told.append(Finding(f"Diverged: {'; '.join(blown)}."))
    if kept.sweep is not None:
        trials, seeds_of = kept.sweep["trials"], kept.sweep["seeds"]
        told.append(Finding(f"The sweep had {trials} trials of SVGD, {seeds_of} seeds each."))
    return told


def _compared(cells: dict[str, Cell], base: Cell, name: str) -> list[Finding]:
    """Which ways differ from tuned settings by more than noise, as far as seeds can tell."""
    differ, alike = f"Differ from {name}", f"Not to be told from {name}"
    unknown = f"Too few seeds in common with {name} to tell"
    told: dict[str, list[str]] = {differ: [], alike: [], unknown: []}
    for way, cell in cells.items():
        difference = paired(cell, base, lambda run: run.final_error)
        if difference is None or difference.interval is None:
            kind = unknown
        else:
            kind = differ if beyond_noise(difference) else alike
        told[kind].append(f"{WAYS[way]} ({difference_entry(difference)})")
    return [Finding(f"{kind}: {'; '.join(ways)}.") for kind, ways in told.items() if ways]
