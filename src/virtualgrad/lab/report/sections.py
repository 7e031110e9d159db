"""Records in the order of a report: one section per recipe, one cell per optimizer.

The readings of a recipe's SVGD (:mod:`virtualgrad.lab.readings`) are a section of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from virtualgrad.lab.readings import BASE, READINGS, reading_names
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import Record, RecordError
from virtualgrad.lab.report.checks import check
from virtualgrad.lab.report.spread import Spread

TITLES = {"rmsprop": "RMSProp", "adam": "Adam", "sgd": "SGD", "svgd": "SVGD", **READINGS}


@dataclass(frozen=True)
class Cell:
    """One optimizer in one recipe, over its seeds.

    Attributes:
        optimizer: Its name in the recipe.
        runs: Its finished runs, in the order of their seeds; at least one.
    """

    optimizer: str
    runs: tuple[Record, ...]

    @property
    def title(self) -> str:
        """What the optimizer is called in tables."""
        return TITLES.get(self.optimizer, self.optimizer)

    @property
    def lowest(self) -> Spread:
        """The lowest test error along each run, in percent."""
        return Spread(tuple(run.lowest_error for run in self.runs))

    @property
    def final(self) -> Spread:
        """The last test error of each run, in percent."""
        return Spread(tuple(run.final_error for run in self.runs))

    @property
    def ms_per_step(self) -> Spread | None:
        """Time of a training step in each run; None where none was measured."""
        times = tuple(run.ms_per_step for run in self.runs if run.ms_per_step is not None)
        return Spread(times) if times else None

    @property
    def state_bytes(self) -> int:
        """Memory that the optimizer's state takes."""
        return max(run.state_bytes for run in self.runs)


@dataclass(frozen=True)
class Section:
    """One recipe: what was measured, and what is still missing.

    Attributes:
        name: The recipe's name; with ``-readings`` where these are what is compared.
        title: What it is called in tables.
        optimizers: The names of all optimizers to show: those of the paper's table, also without
            a finished run, and then those of one's own; or those of all readings.
        cells: The optimizers with finished runs, in the same order.
        paper: Optimizer -> lowest error in the paper's table, in percent, where it has one.
        open_runs: Runs that are unfinished or missing, in a line each.
        caveats: Why the numbers cannot be compared with the paper's; empty if they can.
        on_digits: Whether the runs used the embedded digits in place of the real data.
        of_readings: Whether the optimizers are readings of SVGD.
    """

    name: str
    title: str
    optimizers: tuple[str, ...]
    cells: tuple[Cell, ...]
    paper: Mapping[str, float]
    open_runs: tuple[str, ...]
    caveats: tuple[str, ...]
    on_digits: bool
    of_readings: bool

    @property
    def runs(self) -> tuple[Record, ...]:
        """All finished runs."""
        return tuple(run for cell in self.cells for run in cell.runs)

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return self.runs[0].recipe

    @property
    def reference(self) -> Cell | None:
        """What the others are measured against; None if none of its runs has finished."""
        return self.cell(BASE if self.of_readings else "sgd")

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return self.runs[0].curve.step[-1]

    @property
    def milestones(self) -> tuple[int, ...]:
        """The steps at which the learning rate changed."""
        return tuple(step for step in _milestones(self.runs[0]) if 0 < step < self.steps)

    def cell(self, optimizer: str) -> Cell | None:
        """The cell of an optimizer; None if none of its runs has finished."""
        return next((cell for cell in self.cells if cell.optimizer == optimizer), None)


def gather(records: Sequence[Record]) -> list[Section]:
    """Group records into sections, in the order of the paper's tables; readings come last.

    Args:
        records: All records of a folder, finished or not.

    Raises:
        RecordError: No run has finished, or finished runs cannot be reported together.
    """
    finished = [record for record in records if record.finished]
    if not finished:
        raise RecordError.of(
            given=f"{len(records)} unfinished and no finished run",
            allowed="a folder with at least one finished run",
            todo="run `virtualgrad reproduce` with --resume to finish them",
        )
    check(finished)
    names = {record.recipe for record in finished}
    ordered = [*(name for name in RECIPES if name in names), *sorted(names - RECIPES.keys())]
    groups = [
        [r for r in records if r.recipe == name and (r.optimizer in READINGS) is of_readings]
        for of_readings in (False, True)
        for name in ordered
    ]
    return [_section(group) for group in groups if any(record.finished for record in group)]


def _section(records: list[Record]) -> Section:
    name, of_readings = records[0].recipe, records[0].optimizer in READINGS
    recipe = RECIPES.get(name)
    tuned = recipe.optimizers if recipe and not of_readings else {}
    paper = {name: t.paper_error for name, t in tuned.items() if t.paper_error is not None}
    expected = reading_names(name) if of_readings else paper
    optimizers = tuple(dict.fromkeys([*expected, *sorted(r.optimizer for r in records)]))
    finished = sorted((r for r in records if r.finished), key=lambda record: record.seed)
    runs_of = {name: tuple(r for r in finished if r.optimizer == name) for name in optimizers}
    cells = tuple(Cell(optimizer, runs) for optimizer, runs in runs_of.items() if runs)
    sample = cells[0].runs[0]
    on_digits = "digits" in " ".join(sample.data.values()).lower()
    title = recipe.title if recipe else name
    if of_readings:
        name, title = f"{name}-readings", f"Readings of SVGD, {title}"
    return Section(
        name=name,
        title=f"{title}: run on {_data_name(sample)} instead" if on_digits else title,
        optimizers=optimizers,
        cells=cells,
        paper=paper,
        open_runs=_open_runs(optimizers, records),
        caveats=_caveats(sample, on_digits),
        on_digits=on_digits,
        of_readings=of_readings,
    )


def _open_runs(optimizers: tuple[str, ...], records: list[Record]) -> tuple[str, ...]:
    """Every optimizer is expected to have every seed that any of them has."""
    seeds = {record.seed for record in records}
    lines = []
    for optimizer in optimizers:
        title = TITLES.get(optimizer, optimizer)
        found = [record for record in records if record.optimizer == optimizer]
        for record in sorted(found, key=lambda record: record.seed):
            if not record.finished:
                reached = record.curve.step[-1] if record.curve.step else 0
                lines.append(f"{title}, seed {record.seed}: unfinished, at step {reached:,}")
        missing = sorted(seeds - {record.seed for record in found})
        if missing:
            plural = "s" if len(missing) > 1 else ""
            lines.append(f"{title}, seed{plural} {', '.join(map(str, missing))}: missing")
    return tuple(lines)


def _caveats(sample: Record, on_digits: bool) -> tuple[str, ...]:
    caveats = []
    recipe = RECIPES.get(sample.recipe)
    if on_digits:
        caveats.append(f"the data is {_data_name(sample)}, not the paper's")
    if recipe and sample.curve.step[-1] != recipe.steps:
        caveats.append(
            f"the runs took {sample.curve.step[-1]:,} steps, the paper's {recipe.steps:,}"
        )
    return tuple(caveats)


def _data_name(record: Record) -> str:
    return record.data.get("name", "digits")


def _milestones(record: Record) -> tuple[int, ...]:
    return tuple(record.settings.get("milestones", ()))
