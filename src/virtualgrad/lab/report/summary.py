"""The errors of all finished runs as plain data, for other programs to read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from virtualgrad.lab.report.sections import Cell, Section


def summary(sections: list[Section]) -> dict[str, dict[str, dict[str, Any]]]:
    """Recipe -> optimizer -> errors in percent, in the order of the seeds, and mean step time."""
    by_recipe: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for section in sections:  # a recipe's table and its readings have no name in common
        by_recipe[section.recipe] |= {cell.optimizer: _numbers(cell) for cell in section.cells}
    return dict(by_recipe)


def _numbers(cell: Cell) -> dict[str, Any]:
    time = cell.ms_per_step
    return {
        "data": cell.runs[0].data.get("name"),
        "seeds": [run.seed for run in cell.runs],
        "final": [round(error, 4) for error in cell.final.values],
        "lowest": [round(error, 4) for error in cell.lowest.values],
        "ms_per_step": None if time is None else round(time.mean, 6),
    }
