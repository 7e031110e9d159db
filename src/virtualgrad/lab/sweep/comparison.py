"""Best-tuned against best-tuned: the summaries of several sweeps as one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import RecordError
from virtualgrad.lab.report.content import Content
from virtualgrad.lab.report.spread import Spread
from virtualgrad.lab.report.tables import Entry, Row, Table, error_entry
from virtualgrad.lab.report.verdict import Finding
from virtualgrad.lab.sweep.sensitivity import WITHIN
from virtualgrad.lab.sweep.spaces import SPACES

PLACE = "sweeps"
"""Name of the place for it in a Markdown file."""

NOTE = (
    "Last test error of each optimizer's best settings, mean ± sample standard deviation over "
    "seeds: the best of as many trials for each, chosen by the test set, and so a little too low "
    f"for all. Range: the share of the searched range (four decades of each setting, in log space) "
    f"within {WITHIN} points of that error. SVGD has two settings to search, the others one."
)


def load_summaries(folder: Path) -> list[dict[str, Any]]:
    """What sweeps have left in the folders inside one, in the order of the recipes.

    Raises:
        RecordError: There is none, or one cannot be read.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/summary.json")):
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            for name in summary["optimizers"]:
                spread_of(summary, name)
            found.append({"trials": trials_of(summary), **summary})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError.of(
                given=f"{path}, which is no summary of a sweep ({error!r})",
                allowed="summary.json as `virtualgrad sweep` has written it",
                todo="delete it, or run that sweep again",
            ) from error
    if not found:
        raise RecordError.of(
            given=f"the folder {folder.name!r}, in which no folder has a summary.json",
            allowed="a folder with one such folder for each sweep (its --out)",
            todo="run `virtualgrad sweep RECIPE --out DIR/RECIPE` first",
        )
    order = list(RECIPES)
    return sorted(found, key=lambda s: order.index(s["recipe"]) if s["recipe"] in order else 99)


def spread_of(summary: dict[str, Any], optimizer: str) -> Spread:
    """The errors of an optimizer's best settings."""
    return Spread(tuple(map(float, summary["optimizers"][optimizer]["best"]["errors"])))


def trials_of(summary: dict[str, Any]) -> str:
    """How many trials each optimizer got, in words."""
    counts = {len(each["trials"]) for each in summary["optimizers"].values()}
    low, high = min(counts), max(counts)
    return f"{low} trials each" if low == high else f"{low} to {high} trials"


def compared(summaries: list[dict[str, Any]]) -> Content:
    """A row per optimizer, two columns per network."""
    names = [name for name in SPACES if any(name in s["optimizers"] for s in summaries)]
    columns = [c for s in summaries for c in (f"{_title(s)}, error %", "range, %")]
    rows = tuple(
        Row(SPACES[name].title, tuple(e for s in summaries for e in _entries(s, name)))
        for name in names
    )
    table = Table("Best-tuned against best-tuned", tuple(columns), rows)
    return Content(table, [Finding(_told(summary)) for summary in summaries], NOTE)


def _entries(summary: dict[str, Any], optimizer: str) -> tuple[Entry, Entry]:
    if optimizer not in summary["optimizers"]:
        return Entry(), Entry()
    least = min(round(spread_of(summary, name).mean, 2) for name in summary["optimizers"])
    share = summary["optimizers"][optimizer]["share"]
    range_entry = Entry() if share is None else Entry(f"{100 * share:.0f}")
    return error_entry(spread_of(summary, optimizer), least), range_entry


def _told(summary: dict[str, Any]) -> str:
    """What was searched, and how SVGD stands beside the best of the others."""
    number_format = "bfloat16 autocast" if summary["amp"] else "fp32 (TF32 on a GPU)"
    text = (
        f"{_title(summary)}: {summary['trials']}, {summary['seeds']} seeds, "
        f"{summary['steps']:,} steps, {number_format}."
    )
    others = [name for name in summary["optimizers"] if name != "svgd"]
    if "svgd" not in summary["optimizers"] or not others:
        return text
    best = min(others, key=lambda name: spread_of(summary, name).mean)
    svgd, other = spread_of(summary, "svgd"), spread_of(summary, best)
    difference, error = svgd.mean - other.mean, svgd.error_of_difference(other)
    noise = "one seed each" if error is None else f"standard error {error:.2f}"
    return f"{text} SVGD less {SPACES[best].title}: {difference:+.2f} points ({noise})."


def _title(summary: dict[str, Any]) -> str:
    recipe = summary["recipe"]
    return RECIPES[recipe].title if recipe in RECIPES else str(recipe)
