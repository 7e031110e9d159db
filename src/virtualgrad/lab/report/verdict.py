"""What the numbers show, in words, and whether it meets the goals set for the reproduction."""

from __future__ import annotations

from dataclasses import dataclass

from virtualgrad.lab.report.sections import Cell, Section

METHOD = "svgd"
ROUNDING = 1e-9  # a mean that sums to 1.8999999 still meets 1.9


@dataclass(frozen=True)
class Goal:
    """What a reproduction should reach; all in points of percent.

    Attributes:
        tolerance: How far SVGD's mean may lie from the paper's figure.
        lead: By how much SVGD should beat SGD; None if any lead will do.
    """

    tolerance: float
    lead: float | None = None


GOALS = {"mlp": Goal(0.3), "vgg": Goal(0.8), "resnet20": Goal(1.0, lead=1.5)}


@dataclass(frozen=True)
class Finding:
    """One sentence.

    Attributes:
        text: The sentence.
        holds: Whether a goal is met; None where there is nothing to meet.
    """

    text: str
    holds: bool | None = None


def verdict(section: Section) -> list[Finding]:
    """Say which optimizer is best, how surely so, and how SVGD compares with the paper.

    All of it is computed from the lowest error along each run, as in the paper's tables.
    """
    return [
        *_best(section),
        *_last(section),
        *_lead(section),
        *_paper(section),
        *(Finding(f"Not comparable with the paper: {caveat}.") for caveat in section.caveats),
    ]


def _best(section: Section) -> list[Finding]:
    ranked = sorted(section.cells, key=lambda cell: cell.lowest.mean)
    if len(ranked) < 2:
        return [Finding(f"Only {ranked[0].title} has finished runs: nothing to compare it with.")]
    best, second = ranked[:2]
    text = (
        f"{best.title} has the lowest mean error, {best.lowest.mean:.2f} %: "
        f"{second.lowest.mean - best.lowest.mean:.2f} points below {second.title}"
        f"{_certainty(best, second)}."
    )
    method = section.cell(METHOD)
    if method is None:
        return [Finding(text)]
    if method is not best:
        behind = method.lowest.mean - best.lowest.mean
        text += f" {method.title} lies {behind:.2f} points above it."
    return [Finding(text, holds=None if section.caveats else method is best)]


def _certainty(best: Cell, second: Cell) -> str:
    error = best.lowest.error_of_difference(second.lowest)
    if error is None:
        return " (with one seed, chance cannot be told from merit)"
    if not best.lowest.is_clearly_below(second.lowest):
        return f" (standard error {error:.2f}: these seeds cannot tell the two apart)"
    return f" (standard error {error:.2f})"


def _last(section: Section) -> list[Finding]:
    by_lowest = min(section.cells, key=lambda cell: cell.lowest.mean)
    by_final = min(section.cells, key=lambda cell: cell.final.mean)
    if by_final is by_lowest:
        return []
    return [
        Finding(f"By the last error {by_final.title} is best, {by_final.final.mean:.2f} % on mean.")
    ]


def _lead(section: Section) -> list[Finding]:
    goal = GOALS.get(section.name)
    method, baseline = section.cell(METHOD), section.cell("sgd")
    if section.caveats or goal is None or goal.lead is None or method is None or baseline is None:
        return []
    lead = baseline.lowest.mean - method.lowest.mean
    met = lead >= goal.lead - ROUNDING
    return [
        Finding(
            f"{method.title} is {lead:.2f} points better than {baseline.title}; "
            f"the goal of {goal.lead} points is {'met' if met else 'missed'}.",
            holds=met,
        )
    ]


def _paper(section: Section) -> list[Finding]:
    goal, method = GOALS.get(section.name), section.cell(METHOD)
    paper = section.paper.get(METHOD)
    if section.caveats or goal is None or method is None or paper is None:
        return []
    difference = method.lowest.mean - paper
    within = abs(difference) <= goal.tolerance + ROUNDING
    side = "above" if difference > 0 else "below"
    return [
        Finding(
            f"{method.title}'s mean of {method.lowest.mean:.2f} % lies {abs(difference):.2f} "
            f"points {side} the paper's {paper:.2f} %: "
            f"{'within' if within else 'outside'} the tolerance of {goal.tolerance}.",
            holds=within,
        )
    ]
