"""One look for every figure: fonts, colours, sizes and reproducible files.

Figures are made without pyplot, so that no global state and no display is touched: a
:class:`matplotlib.figure.Figure` draws itself with Agg (PNG) or as SVG when it is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""From the palette of Okabe and Ito, whose colours stay apart for colour-blind readers."""

GREY = "#6E6E6E"

WIDTH = 7.2
"""Inches: the text width of a paper in one column."""

_STYLE: Any = {
    "font.family": "STIXGeneral",  # comes with matplotlib: the same picture on every machine
    "mathtext.fontset": "stix",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "legend.title_fontsize": 8.0,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 6.0,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.visible": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "savefig.dpi": 200,
    "svg.hashsalt": "virtualgrad",  # element ids that do not change from run to run
}


@contextmanager
def paper(width: float, height: float) -> Iterator[Figure]:
    """An empty figure, of a size in inches, in the common style while the block lasts."""
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def name_panels(panels: Sequence[Axes], titles: Sequence[str]) -> None:
    """Title the panels (a), (b), ... so that a text can refer to them."""
    for letter, panel, title in zip("abcdefgh", panels, titles, strict=False):
        panel.set_title(rf"$\bf{{{letter}}}$  {title}")


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Save as PNG and SVG, the same bytes for the same numbers, and return both paths.

    Call inside the block of :func:`paper`: the style also rules how the files are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png)
    figure.savefig(svg, metadata={"Date": None})
    return png, svg
