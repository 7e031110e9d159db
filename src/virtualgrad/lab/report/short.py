"""All sections in one table, as short as a README wants it: three lines for each network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from virtualgrad.lab.report.sections import TITLES, Cell, Section
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.report.tables import Entry, Row, Table, error_entry


def short_table(sections: Sequence[Section]) -> Table:
    """Errors and the paper's, SVGD first; rates and scales are left to the long tables.

    An error stands out only if it lies below each of the others by more than twice the standard
    error of their difference: a reader of a short table should not have to look that up.
    """
    optimizers = tuple(
        dict.fromkeys(name for section in sections for name in reversed(section.optimizers))
    )
    return Table(
        title="Test error, %",
        columns=tuple(TITLES.get(name, name) for name in optimizers),
        rows=tuple(row for section in sections for row in _rows(section, optimizers)),
    )


def short_note(sections: Sequence[Section]) -> str:
    """How to read it, and why numbers cannot be compared with the paper's, if they cannot."""
    numbers = {len(cell.runs) for section in sections for cell in section.cells}
    seeds = f"{numbers.pop()} seeds" if len(numbers) == 1 else "seeds"
    lines = [
        f"Lowest and last test error of a run, %: mean ± sample standard deviation over {seeds}. "
        "Bold: below all others by more than two standard errors. The paper gives the lowest error "
        "of one run."
    ]
    lines += [
        f"{section.title}: not comparable with the paper, as {caveat}."
        for section in sections
        for caveat in section.caveats
    ]
    return " ".join(lines)


def _rows(section: Section, optimizers: tuple[str, ...]) -> tuple[Row, Row, Row]:
    cells = tuple(map(section.cell, optimizers))
    paper = {} if section.caveats else section.paper
    return (
        Row(f"{section.title}: lowest", _errors(cells, lambda cell: cell.lowest)),
        Row("last", _errors(cells, lambda cell: cell.final)),
        Row(
            "paper's lowest",
            tuple(Entry(f"{paper[name]:.2f}") if name in paper else Entry() for name in optimizers),
        ),
    )


def _errors(cells: tuple[Cell | None, ...], spread: Callable[[Cell], Spread]) -> tuple[Entry, ...]:
    entries = []
    for cell in cells:
        if cell is None:
            entries.append(Entry())
            continue
        others = [spread(other) for other in cells if other is not None and other is not cell]
        best = bool(others) and all(map(spread(cell).is_clearly_below, others))
        entries.append(replace(error_entry(spread(cell)), best=best))
    return tuple(entries)
