"""Plots as files, and as drawings inside the page that follow its colours and its font."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from virtualgrad.lab.figures.style import WIDTH, paper
from virtualgrad.lab.report.colors import INK, VARIABLES
from virtualgrad.lab.report.plots import Panel, Plot

NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}
PANEL_WIDTH = 3.9
LEGEND_LINE, LEGEND_LETTER = 0.5, 0.07  # inches that an entry takes, and each letter of its name

_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "text.parse_math": False,  # names of optimizers are text, whatever signs they hold
}
_IN_PAGE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # at least as wide as what a browser will put in its place
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 8.0,
    "svg.fonttype": "none",
}


def as_files(plot: Plot) -> tuple[bytes, str]:
    """All panels side by side, as PNG and as SVG; the same plot gives the same bytes."""
    png = BytesIO()
    with _drawn(plot, plot.panels, WIDTH, {}) as figure:
        figure.suptitle(plot.title, x=0.005, horizontalalignment="left", fontsize="large")
        figure.savefig(png, format="png", metadata={"Software": None})
        return png.getvalue(), _svg(figure)


def for_page(plot: Plot) -> list[str]:
    """One SVG element per panel, to stand in an HTML page with the variables of `colors`."""
    elements = []
    for number, panel in enumerate(plot.panels):
        with _drawn(plot, [panel], PANEL_WIDTH, _IN_PAGE) as figure:
            elements.append(_embedded(_svg(figure), f"{plot.name}-{number}"))
    return elements


@contextmanager
def _drawn(
    plot: Plot, panels: Sequence[Panel], width: float, style: dict[Any, Any]
) -> Iterator[Figure]:
    with (
        paper(width, plot.height) as figure,
        matplotlib.rc_context({**_STYLE, **style}),
    ):
        places = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, axes in zip(panels, places, strict=True):
            panel(axes)
        if plot.legend:
            lines, names = places[0].get_legend_handles_labels()
            room = sum(LEGEND_LINE + LEGEND_LETTER * len(name) for name in names)
            ncols = math.ceil(len(names) / math.ceil(room / width))
            figure.legend(lines, names, loc="outside lower center", ncols=ncols, handlelength=2.6)
        yield figure


def _svg(figure: Figure) -> str:
    stream = StringIO()
    figure.savefig(stream, format="svg", metadata=NO_METADATA)
    return re.sub(r"[ \t]+$", "", stream.getvalue(), flags=re.MULTILINE)


def _embedded(svg: str, prefix: str) -> str:
    """Turn an SVG file into an element: ids of its own, no style or white ground for the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (xmlns(:xlink)?|width|height|version)="[^"]*"', "", svg, count=5)
    svg = svg.replace("xlink:href=", "href=").replace("fill: #ffffff", "fill: none")
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for color, (name, _) in VARIABLES.items():
        svg = svg.replace(color.lower(), f"var({name})")
    return svg
