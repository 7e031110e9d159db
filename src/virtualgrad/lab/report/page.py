"""Everything on one page that needs nothing but itself: style and drawings are inside it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import Record
from virtualgrad.lab.report.bars import byte_count
from virtualgrad.lab.report.colors import css_variables
from virtualgrad.lab.report.content import Content, content_of
from virtualgrad.lab.report.drawing import for_page
from virtualgrad.lab.report.markdown import DIGITS_WARNING
from virtualgrad.lab.report.plots import Plot, plots_of
from virtualgrad.lab.report.sections import TITLES, Section
from virtualgrad.lab.report.tables import NONE, plain_number

PER_RUN = ("optimizer", "seed", "lowest, %", "last, %", "ms per step", "state", "peak memory")


@dataclass(frozen=True)
class Figure:
    """A plot with its drawings."""

    plot: Plot
    drawings: tuple[Markup, ...]


@dataclass(frozen=True)
class Chapter:
    """What the page shows of a section."""

    section: Section
    content: Content
    figures: list[Figure]
    settings: list[list[str]]
    runs: list[list[str]]


def page(sections: list[Section]) -> str:
    """The page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_resource("page.html.jinja"))
    runs = [run for section in sections for run in section.runs]
    return template.render(
        chapters=[_chapter(section) for section in sections],
        style=Markup(css_variables() + _resource("page.css")),  # both are the library's own text
        warning=DIGITS_WARNING if any(section.on_digits for section in sections) else None,
        environment=_environment(runs),
        run_count=len(runs),
        dates=_dates(runs),
        devices=_distinct(run.environment.get("device") for run in runs),
        absent=_absent(sections),
        of_readings=all(section.of_readings for section in sections),
        per_run=PER_RUN,
        titles=TITLES,
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _chapter(section: Section) -> Chapter:
    return Chapter(
        section=section,
        content=content_of(section),
        figures=[
            Figure(plot, tuple(Markup(drawing) for drawing in for_page(plot)))
            for plot in plots_of(section)
        ],
        settings=_settings(section),
        runs=[_run(run) for run in section.runs],
    )


def _settings(section: Section) -> list[list[str]]:
    """A row per setting: its name, and its value for each optimizer."""
    settings = [cell.runs[0].settings for cell in section.cells]
    keys = dict.fromkeys(key for each in settings for key in each)
    return [[key, *(_text(each.get(key)) for each in settings)] for key in keys]


def _run(run: Record) -> list[str]:
    return [
        TITLES.get(run.optimizer, run.optimizer),
        str(run.seed),
        f"{run.lowest_error:.2f}",
        f"{run.final_error:.2f}",
        NONE if run.ms_per_step is None else f"{run.ms_per_step:#.3g}",
        byte_count(run.state_bytes),
        NONE if run.peak_memory_bytes is None else byte_count(run.peak_memory_bytes),
    ]


def _absent(sections: list[Section]) -> list[str]:
    """The paper's tables without a run, where there is any of the paper's tables."""
    found = {section.recipe for section in sections if not section.of_readings}
    return [recipe.title for name, recipe in RECIPES.items() if found and name not in found]


def _environment(runs: list[Record]) -> list[tuple[str, str]]:
    """Each fact of the environments with every value that it has among the runs."""
    keys = dict.fromkeys(key for run in runs for key in run.environment if key != "date")
    facts = [(key, _distinct(run.environment.get(key) for run in runs)) for key in keys]
    data = _distinct(f"{run.data.get('name')}: {run.data.get('source')}" for run in runs)
    return [("data", data), *facts, ("date", _dates(runs))]


def _dates(runs: list[Record]) -> str:
    dates = sorted(str(run.environment["date"])[:10] for run in runs if "date" in run.environment)
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NONE


def _distinct(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(_text, values)))


def _text(value: Any) -> str:
    """A value of a record as a reader wants it."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return plain_number(value) if isinstance(value, float) else str(value)
