"""A section as a table like the paper's: optimizers side by side, learning rates above errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from virtualgrad.lab.report.sections import TITLES, Cell, Section
from virtualgrad.lab.report.spread import Spread

NONE = "–"


@dataclass(frozen=True)
class Entry:
    """One entry of a table.

    Attributes:
        text: The number, or a dash.
        sd: Its standard deviation over seeds; empty where there is none to give.
        best: Whether it is the best of its row.
    """

    text: str = NONE
    sd: str = ""
    best: bool = False

    def __str__(self) -> str:
        return f"{self.text} ± {self.sd}" if self.sd else self.text


@dataclass(frozen=True)
class Row:
    """A label, and an entry for every optimizer."""

    label: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """One recipe's table.

    Attributes:
        title: What was trained on what.
        columns: The optimizers.
        rows: The rows, in the order of the paper's tables.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def table_of(section: Section) -> Table:
    """Lay a section out like the paper's table for it."""
    return Table(
        title=section.title,
        columns=tuple(TITLES.get(name, name) for name in section.optimizers),
        rows=(
            *_learning_rates(section),
            _row(section, "s", _scale),
            _errors(section, "lowest error, %", lambda cell: cell.lowest),
            _errors(section, "last error, %", lambda cell: cell.final),
            _row(section, "seeds", lambda cell: str(len(cell.runs))),
            _paper(section),
            _row(section, "difference, points", partial(_difference, section)),
        ),
    )


def _scale(cell: Cell) -> str:
    scale = cell.runs[0].settings.get("scale")
    return NONE if scale is None else plain_number(scale)


def _learning_rates(section: Section) -> list[Row]:
    return [
        _row(section, f"α from step {begin:,}", partial(_rate, phase))
        for phase, begin in enumerate((0, *section.milestones))
    ]


def _rate(phase: int, cell: Cell) -> str:
    rates = cell.runs[0].settings.get("lr", ())
    return plain_number(rates[phase]) if phase < len(rates) else NONE


def _paper(section: Section) -> Row:
    errors = map(section.paper.get, section.optimizers)
    return Row(
        "paper's lowest, %",
        tuple(Entry() if error is None else Entry(f"{error:.2f}") for error in errors),
    )


def _difference(section: Section, cell: Cell) -> str:
    paper = section.paper.get(cell.optimizer)
    if section.caveats or paper is None:
        return NONE
    return f"{cell.lowest.mean - paper:+.2f}".replace("-", "−")


def _row(section: Section, label: str, text: Callable[[Cell], str]) -> Row:
    cells = map(section.cell, section.optimizers)
    return Row(label, tuple(Entry(text(cell)) if cell else Entry() for cell in cells))


def _errors(section: Section, label: str, spread: Callable[[Cell], Spread]) -> Row:
    least = min(round(spread(cell).mean, 2) for cell in section.cells)
    return Row(
        label,
        tuple(
            _error(spread(cell), least) if cell else Entry()
            for cell in map(section.cell, section.optimizers)
        ),
    )


def _error(spread: Spread, least: float) -> Entry:
    return Entry(
        f"{spread.mean:.2f}",
        NONE if spread.sd is None else f"{spread.sd:.2f}",
        best=round(spread.mean, 2) == least,
    )


def plain_number(value: float) -> str:
    """A setting without an exponent, as the paper writes it: 5e-05 is 0.00005."""
    return np.format_float_positional(value, trim="-")
