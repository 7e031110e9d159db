"""Two pictures: the ratio to SGD of everything, and how it grows with each size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from virtualgrad.lab.bench.methods import METHODS, REFERENCE
from virtualgrad.lab.bench.modes import MODES
from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.bench.scaling import AXES, place_of
from virtualgrad.lab.bench.titles import method_title, methods_of, network_title, of_peers
from virtualgrad.lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK, WIDTH, paper, save
from virtualgrad.lab.report.colors import OTHERS

COLORS = {
    "momentum": BLUE,
    "rmsprop": PINK,
    "adam": GREEN,
    "adam-fused": OTHERS[2],
    "svgd": ORANGE,
    "svgd-released": OTHERS[0],
    "svgd-shared": OTHERS[1],
    "svgd-unchecked": OTHERS[3],
}
MARKERS = {"svgd": "s", "svgd-released": "D", "svgd-shared": "^", "svgd-unchecked": "v"}
PANEL = 1.7  # inches: the longest title has room
AXIS_LABELS = {
    "batch": "samples in a batch",
    "width": "channels",
    "image": "side of the image",
    "depth": "convolutions",
}


def draw_ratios(rows: Sequence[Row], folder: Path) -> tuple[Path, Path] | None:
    """Draw the ratio of every optimizer to SGD, and save ``ratio.png`` and ``ratio.svg``.

    A panel per mode and number format, a line per network; other libraries are left out.

    Returns:
        The two files; None if there is nothing to draw.
    """
    shown = [row for row in _with_ratio(rows) if not of_peers(row)]
    if not shown:
        return None
    there = {row.mode for row in shown}
    modes = [mode for mode in MODES if mode in there]
    dtypes = list(dict.fromkeys(row.dtype for row in shown))
    models = list(dict.fromkeys(row.model for row in shown))
    height = 0.9 + len(dtypes) * (0.7 + 0.3 * len(models))
    with paper(max(WIDTH, PANEL * len(modes)), height) as figure:
        grid = figure.subplots(len(dtypes), len(modes), squeeze=False, sharex=True, sharey=True)
        for dtype, panels in zip(dtypes, grid, strict=True):
            for mode, panel in zip(modes, panels, strict=True):
                panel.set_title(f"{mode}, {dtype}")
                here = [row for row in shown if (row.mode, row.dtype) == (mode, dtype)]
                _dots(panel, here, models)
        grid[0, 0].invert_yaxis()  # once: the panels share the axis
        for panel in grid[-1]:
            panel.set_xlabel("time of a step / SGD's")
        _legend(figure, methods_of(shown))
        return save(figure, folder, "ratio")


def _dots(panel: Axes, rows: Sequence[Row], models: Sequence[str]) -> None:
    panel.axvline(1, color=GREY, linewidth=0.7, zorder=0)
    optimizers = methods_of(rows)
    for row in rows:
        # A little above or below the middle of the line, so that dots do not hide each other.
        shift = (optimizers.index(row.optimizer) + 0.5) / len(optimizers) - 0.5
        place, color = models.index(row.model) + 0.7 * shift, _color(row.optimizer)
        panel.plot(row.ratio_quartiles or (), [place] * 2, color=color, linewidth=0.9)
        panel.plot(row.ratio_to_sgd or 0, place, MARKERS.get(row.optimizer, "o"), color=color)
        if _counts_g(row.optimizer) and row.floor_ratio is not None:
            panel.plot(row.floor_ratio, place, "|", color=color, markersize=6)
    panel.set_yticks(range(len(models)), [network_title(model) for model in models])
    panel.tick_params(axis="y", length=0)


def _legend(figure: Figure, optimizers: Sequence[str]) -> None:
    panel = figure.axes[0]
    for name in optimizers:
        panel.plot([], [], MARKERS.get(name, "o"), color=_color(name), label=method_title(name))
    panel.plot([], [], "|", color=GREY, markersize=6, label="floor")
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5))


def draw_scaling(rows: Sequence[Row], folder: Path) -> tuple[Path, Path] | None:
    """Draw the ratio along each axis, and save ``scaling.png`` and ``scaling.svg``.

    Returns:
        The two files; None if there is nothing to draw.
    """
    shown = _with_ratio(rows)
    if not shown:
        return None
    with paper(WIDTH, 4.6) as figure:
        panels = figure.subplots(2, 2, sharey=True).flat
        for axis, panel in zip(AXES, panels, strict=True):
            panel.axhline(1, color=GREY, linewidth=0.7, zorder=0)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.set_xlabel(AXIS_LABELS[axis])
            for name in methods_of(shown):
                _line(panel, axis, [row for row in shown if row.optimizer == name])
        figure.supylabel("time of a step / SGD's", fontsize="medium")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return save(figure, folder, "scaling")


def _line(panel: Axes, axis: str, rows: Sequence[Row]) -> None:
    """One optimizer along one axis: measured, and the floor."""
    points = sorted(
        (place[1], row.ratio_to_sgd or 0, row.ratio_quartiles or (0, 0), row.floor_ratio)
        for row in rows
        if (place := place_of(row.model)) is not None and place[0] == axis
    )
    if not points:
        return
    sizes, ratios, quartiles, floors = zip(*points, strict=True)
    name = rows[0].optimizer
    title, color = method_title(name), _color(name)
    panel.plot(sizes, ratios, color=color, marker=MARKERS.get(name, "o"), label=title)
    lower, upper = zip(*quartiles, strict=True)
    panel.fill_between(sizes, lower, upper, color=color, alpha=0.2, linewidth=0)
    if None not in floors:
        panel.plot(sizes, floors, ":", color=color, label=f"{title}, floor")


def _with_ratio(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.ratio_to_sgd is not None and row.optimizer != REFERENCE]


def _color(optimizer: str) -> str:
    return COLORS.get(optimizer, GREY)


def _counts_g(optimizer: str) -> bool:
    method = METHODS.get(optimizer)
    return method is not None and method.statistics is not None
