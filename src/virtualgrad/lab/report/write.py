"""The files of a report, written so that each is always either the old or the new one."""

from __future__ import annotations

import json
from pathlib import Path

from virtualgrad.lab.record import load_records, write_safely
from virtualgrad.lab.report.markdown import markdown
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.summary import summary

PAGE = "report.html"


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Report the records of a folder; the same records give the same bytes.

    Args:
        folder: Holds the records, such as ``mlp-svgd-seed0.json``.
        out: Where to write; the same folder if None.

    Returns:
        The path of the page.

    Raises:
        RecordError: There is no record or no finished run, a record is damaged, or runs that would
            be averaged were not made alike.
    """
    # Who only trains needs neither Jinja nor matplotlib, and this package is imported then too.
    from virtualgrad.lab.report.drawing import as_files  # noqa: PLC0415
    from virtualgrad.lab.report.page import page  # noqa: PLC0415
    from virtualgrad.lab.report.plots import plots_of  # noqa: PLC0415

    out = out or folder
    sections = gather(load_records(folder))
    texts = {
        "summary.json": json.dumps(summary(sections), indent=1) + "\n",
        "tables.md": markdown(sections),
        PAGE: page(sections),
    }
    for plot in (plot for section in sections for plot in plots_of(section)):
        png, texts[f"{plot.name}.svg"] = as_files(plot)
        write_safely(out / f"{plot.name}.png", png)
    for name, text in texts.items():
        write_safely(out / name, text)
    return out / PAGE
