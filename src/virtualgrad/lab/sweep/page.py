"""The results on one page that needs nothing but itself, in the style of `virtualgrad report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from virtualgrad.lab.report.colors import css_variables
from virtualgrad.lab.report.drawing import for_page
from virtualgrad.lab.report.page import Figure
from virtualgrad.lab.sweep.plots import plots_of
from virtualgrad.lab.sweep.results import Result, content_of
from virtualgrad.lab.sweep.search import End
from virtualgrad.lab.sweep.texts import snippet


@dataclass(frozen=True)
class Chapter:
    """What the page shows of an optimizer."""

    name: str
    title: str
    figures: list[Figure]
    columns: list[str]
    rows: list[list[str]]


def page(results: Sequence[Result], warning: str | None = None) -> str:
    """The page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_text("virtualgrad.lab.sweep", "page.html.jinja"))
    style = css_variables() + _text("virtualgrad.lab.report", "page.css")
    trials = sum(len(result.trials) for result in results)
    recipe = results[0].recipe
    seeds = max(len(trial.errors) for result in results for trial in result.trials)
    return template.render(
        content=content_of(results),
        style=Markup(style),  # both are the library's own text
        warning=warning,
        lead=f"{trials} finished trials; {recipe.steps:,} steps, {seeds} seed{'s' * (seeds > 1)}.",
        snippet=snippet(results),
        chapters=[_chapter(result) for result in results],
    )


def _text(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _chapter(result: Result) -> Chapter:
    figures = [
        Figure(plot, tuple(Markup(drawing) for drawing in for_page(plot)))
        for plot in plots_of(result)
    ]
    names = list(result.space.ranges)
    rows = []
    for trial in sorted(result.trials, key=lambda t: (t.end is End.PRUNED, t.spread.mean)):
        settings = [f"{trial.settings[name]:.4g}" for name in names]
        sd = "" if trial.spread.sd is None else f" ± {trial.spread.sd:.2f}"
        error = f"{trial.spread.mean:.2f}{sd}"
        rows.append([str(trial.number), *settings, error, trial.end.value])
    columns = ["trial", *names, "last error, %", "end"]
    return Chapter(result.optimizer, result.space.title, figures, columns, rows)
