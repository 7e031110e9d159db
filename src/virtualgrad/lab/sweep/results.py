"""What the trials of a recipe show: the best settings of each optimizer, and how much they matter.

A table with a row per optimizer, and sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from virtualgrad.lab.recipes import Recipe, Tuned
from virtualgrad.lab.report.content import Content
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.report.tables import NONE, Entry, Row, Table, error_entry, plain_number
from virtualgrad.lab.report.verdict import Finding
from virtualgrad.lab.sweep.search import End, Trial
from virtualgrad.lab.sweep.sensitivity import WITHIN, best_of, share_within
from virtualgrad.lab.sweep.spaces import SCALE, SPACES, Space, tuned

EDGE = 0.05
"""Share of a range, at either end, in which the best setting makes one doubt the range."""

DIGITS = 4
"""Significant digits of a setting in a recipe."""

NOTE = (
    "α is the learning rate of the first phase, s the scale. Errors are those of the last step: "
    "mean ± sample standard deviation over seeds, and the 95 % interval of the mean by Student's "
    "t. They are the best of many trials, chosen by the test set, and so a little too low; train "
    f"the best settings with other seeds to know them. Range within {WITHIN}: the share of the "
    "searched range, in log space, whose error is at most so many points above the best; every "
    "place counts with the error of the trial nearest to it. Pruned trials were far behind others "
    "when they were stopped; settings whose training left the finite numbers (diverged) count "
    "with an error of 100 %."
)


@dataclass(frozen=True)
class Result:
    """One optimizer's trials.

    Attributes:
        recipe: what was trained.
        optimizer: name in :data:`virtualgrad.lab.sweep.spaces.SPACES`.
        trials: the finished ones; at least one of them not pruned.
    """

    recipe: Recipe
    optimizer: str
    trials: tuple[Trial, ...]

    @property
    def space(self) -> Space:
        """What was searched."""
        return SPACES[self.optimizer]

    @cached_property
    def best(self) -> Trial:
        """The trial of the lowest mean error."""
        best = best_of(self.trials)
        assert best is not None, "trials are pruned only beside finished ones"
        return best

    @cached_property
    def share(self) -> float | None:
        """The share of the range that does nearly as well; None if every trial diverged."""
        return share_within(self.trials, self.space.ranges)

    @property
    def tuned(self) -> Tuned:
        """The best settings for a recipe, rounded."""
        rounded = {k: float(f"{v:.{DIGITS}g}") for k, v in self.best.settings.items()}
        found = tuned(self.recipe, self.optimizer, rounded)
        lr = tuple(float(f"{rate:.{DIGITS}g}") for rate in found.lr)
        return Tuned(found.method, lr, found.options)

    def count(self, end: End) -> int:
        """How many trials ended so."""
        return sum(trial.end is end for trial in self.trials)

    @property
    def at_edge(self) -> list[str]:
        """Settings whose best value lies at an end of its range."""
        places = {k: r.place(self.best.settings[k]) for k, r in self.space.ranges.items()}
        return [name for name, place in places.items() if not EDGE <= place <= 1 - EDGE]


COLUMNS = (
    "α",
    "s",
    "last error, %",
    "95 % interval",
    "trials",
    "pruned",
    "diverged",
    f"range within {WITHIN}, %",
)


def content_of(results: Sequence[Result]) -> Content:
    """The table of a recipe, an optimizer per row, with what it shows."""
    least = min(round(result.best.spread.mean, 2) for result in results)
    widest = max(result.share or 0 for result in results) if len(results) > 1 else None
    rows = tuple(Row(result.space.title, _entries(result, least, widest)) for result in results)
    title = f"Best settings, {results[0].recipe.title}"
    return Content(Table(title, COLUMNS, rows), findings(results), NOTE)


def _entries(result: Result, least: float, widest: float | None) -> tuple[Entry, ...]:
    best, share = result.tuned, result.share
    counts = (len(result.trials), result.count(End.PRUNED), result.count(End.DIVERGED))
    return (
        Entry(plain_number(best.lr[0])),
        Entry(plain_number(best.options[SCALE])) if SCALE in best.options else Entry(),
        error_entry(result.best.spread, least),
        Entry(_interval(result.best.spread)),
        *(Entry(str(count)) for count in counts),
        Entry() if share is None else Entry(f"{100 * share:.1f}", best=share == widest),
    )


def _interval(spread: Spread) -> str:
    interval = spread.interval
    return NONE if interval is None else f"{max(interval[0], 0):.2f}–{interval[1]:.2f}"


def findings(results: Sequence[Result]) -> list[Finding]:
    """What the numbers show, in words."""
    told = [Finding(_told(result)) for result in results]
    if len(results) > 1:
        order = sorted(results, key=lambda result: result.best.spread.mean)
        told.insert(0, Finding(_compared(order[0], order[1])))
        known = sorted((r for r in results if r.share), key=lambda r: -(r.share or 0))
        if known:
            widest = known[0]
            told.insert(1, Finding(
                f"{widest.space.title} is the least sensitive: {100 * (widest.share or 0):.0f} % "
                f"of its range lies within {WITHIN} points of its best."
            ))  # fmt: skip
    counts = {result.space.title: len(result.trials) for result in results}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{title} {count}" for title, count in counts.items())
        told.append(Finding(f"Not the same number of trials for all: {each}.", holds=False))
    for result in results:
        for name in result.at_edge:
            told.append(Finding(
                f"{result.space.title}'s best {name} lies at an end of its range: better ones may "
                "lie outside.", holds=False,
            ))  # fmt: skip
    return told


def _told(result: Result) -> str:
    settings = ", ".join(
        f"{name} {value:.{DIGITS}g}" for name, value in result.best.settings.items()
    )
    text = f"{result.space.title}: lowest error {result.best.spread.mean:.2f} % with {settings}"
    if result.share is None:
        return f"{text}; every trial diverged."
    return f"{text}; {100 * result.share:.1f} % of the range lies within {WITHIN} points of it."


def _compared(first: Result, second: Result) -> str:
    a, b = first.best.spread, second.best.spread
    text = (
        f"{first.space.title} has the lowest error, {a.mean:.2f} %: {b.mean - a.mean:.2f} points "
        f"below {second.space.title}"
    )
    error = a.error_of_difference(b)
    if error is None:
        return f"{text} (one seed each: noise is not known)."
    close = b.mean - a.mean < 2 * error
    hint = ": these seeds cannot tell the two apart" if close else ""
    return f"{text} (standard error {error:.2f}{hint})."
