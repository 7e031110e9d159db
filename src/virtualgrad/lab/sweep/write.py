"""The files of a sweep, written so that each is always either the old or the new one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from virtualgrad.lab.record import write_safely
from virtualgrad.lab.report.drawing import as_files
from virtualgrad.lab.report.markdown import written
from virtualgrad.lab.sweep.page import page
from virtualgrad.lab.sweep.plots import plots_of
from virtualgrad.lab.sweep.results import Result, content_of
from virtualgrad.lab.sweep.texts import snippet, summary

PAGE = "sweep.html"


def write_results(
    results: Sequence[Result], out: Path, identity: Mapping[str, Any], warning: str | None = None
) -> Path:
    """Write page, tables, summary, recipe and plots; the same trials give the same bytes.

    Args:
        results: One for each optimizer, of the same recipe.
        out: The folder to write to.
        identity: What all trials have in common, for the summary.
        warning: Stands above everything on the page.

    Returns:
        The path of the page.
    """
    texts = {
        "summary.json": json.dumps(summary(results, identity), indent=1) + "\n",
        "tables.md": written([content_of(results)]),
        "recipe.py": snippet(results),
        PAGE: page(results, warning),
    }
    for plot in (plot for result in results for plot in plots_of(result)):
        png, texts[f"{plot.name}.svg"] = as_files(plot)
        write_safely(out / f"{plot.name}.png", png)
    for name, text in texts.items():
        write_safely(out / name, text)
    return out / PAGE
