"""Tables as plain data, and a section as one like the paper's: optimizers side by side."""

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
        sd: Its standard deviation over seeds, or the standard error of a difference; empty where
            there is none to give.
        best: Whether it stands out: the best of its row, or a difference that is not noise.
    """

    text: str = NONE
    sd: str = ""
    best: bool = False

    def __str__(self) -> str:
        return f"{self.text} ± {self.sd}" if self.sd else self.text


@dataclass(frozen=True)
class Row:
    """A label, and an entry for every column."""

    label: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """One recipe's table.

    Attributes:
        title: What was trained on what.
        columns: The optimizers; where these are the rows, what was measured.
        rows: The rows, from top to bottom.
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
    return signed(cell.lowest.mean - paper)


def _row(section: Section, label: str, text: Callable[[Cell], str]) -> Row:
    cells = map(section.cell, section.optimizers)
    return Row(label, tuple(Entry(text(cell)) if cell else Entry() for cell in cells))


def _errors(section: Section, label: str, spread: Callable[[Cell], Spread]) -> Row:
    least = min(round(spread(cell).mean, 2) for cell in section.cells)
    return Row(
        label,
        tuple(
            error_entry(spread(cell), least) if cell else Entry()
            for cell in map(section.cell, section.optimizers)
        ),
    )


def error_entry(spread: Spread, least: float | None = None) -> Entry:
    """Mean and deviation of an error; it stands out if its mean is the least."""
    return Entry(
        f"{spread.mean:.2f}",
        NONE if spread.sd is None else f"{spread.sd:.2f}",
        best=round(spread.mean, 2) == least,
    )


def time_entry(cell: Cell) -> Entry:
    """Mean time of a training step, in milliseconds."""
    time = cell.ms_per_step
    if time is None:
        return Entry()
    return Entry(f"{time.mean:,.0f}" if time.mean >= 100 else f"{time.mean:#.3g}")


def signed(value: float) -> str:
    """A difference in points, with its sign; what rounds to zero is +0.00."""
    return f"{value:+z.2f}".replace("-", "−")


def plain_number(value: float) -> str:
    """A setting without an exponent, as the paper writes it: 5e-05 is 0.00005."""
    return np.format_float_positional(value, trim="-")
