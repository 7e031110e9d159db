"""The plots of an optimizer's trials: where errors are low, and which settings lead there."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from virtualgrad.lab.figures.style import GREY, ORANGE
from virtualgrad.lab.report.colors import GRID, INK
from virtualgrad.lab.report.plots import Panel, Plot
from virtualgrad.lab.report.tables import plain_number
from virtualgrad.lab.sweep.results import Result
from virtualgrad.lab.sweep.search import End
from virtualgrad.lab.sweep.sensitivity import WITHIN, nearest
from virtualgrad.lab.sweep.spaces import LR, SCALE, Range

COLORS = "viridis"
LABELS = {LR: "α, the first learning rate", SCALE: "s, the scale"}
MARKS = {End.COMPLETE: "o", End.PRUNED: "x", End.DIVERGED: "x"}
SPAN = (2.0, 10.0)  # points of error that the scale shows at least, and at most


def plots_of(result: Result) -> list[Plot]:
    """Error over the settings (a heat map where there are two), and parallel coordinates."""
    title = f"{result.space.title}, {result.recipe.title}"
    surface: tuple[Panel, ...] = (partial(error_along, result, LR),)
    caption = f"The line is the best error and {WITHIN} points above it; crosses were stopped."
    if len(result.space.ranges) == 2:
        surface = (partial(heat_map, result), *surface)
        caption = f"Every place has the error of the trial nearest to it (dots). {caption}"
    return [
        Plot(
            name=f"error-{result.optimizer}",
            title=title,
            alt=f"Test error over the searched settings, {title}",
            caption=f"{caption} The ring is the best trial.",
            panels=surface,
            legend=False,
            height=3.1,
        ),
        Plot(
            name=f"trials-{result.optimizer}",
            title=title,
            alt=f"Parallel coordinates of all trials, {title}",
            caption="A line per trial, from its settings to its error; the darker, the lower.",
            panels=(partial(parallel_coordinates, result),),
            legend=False,
            height=3.1,
        ),
    ]


def heat_map(result: Result, axes: Axes) -> None:
    """Draw the error of the nearest trial at every place of two ranges."""
    (first, across), (second, up) = result.space.ranges.items()
    errors = np.array([trial.spread.mean for trial in result.trials])
    image = axes.imshow(
        errors[nearest(result.trials, result.space.ranges)].T,
        origin="lower",
        extent=(0, 1, 0, 1),
        aspect="auto",
        cmap=COLORS,
        norm=_norm(result),
    )
    for trial in result.trials:
        places = across.place(trial.settings[first]), up.place(trial.settings[second])
        axes.plot(*places, MARKS[trial.end], color="w", markersize=3.2, markeredgewidth=1.4)
        axes.plot(*places, MARKS[trial.end], color=INK, markersize=2.0, markeredgewidth=0.8)
    best = result.best.settings
    axes.plot(across.place(best[first]), up.place(best[second]), "o", markersize=8,
              markerfacecolor="none", markeredgecolor=ORANGE, markeredgewidth=1.6)  # fmt: skip
    axes.set(xlabel=LABELS.get(first, first), ylabel=LABELS.get(second, second))
    axes.set_title("Test error, %")
    axes.xaxis.set(major_locator=MaxNLocator(4), major_formatter=_values(across))
    axes.yaxis.set(major_locator=MaxNLocator(4), major_formatter=_values(up))
    axes.figure.colorbar(image, ax=axes, extend="max", pad=0.02)


def error_along(result: Result, name: str, axes: Axes) -> None:
    """Draw the error of every trial over one setting."""
    within, norm = result.space.ranges[name], _norm(result)
    top = norm.vmax or 100.0
    for trial in result.trials:
        error = trial.spread.mean
        axes.plot(
            within.place(trial.settings[name]),
            min(error, top),  # what is off the scale stands at its edge
            MARKS[trial.end],
            color=colormaps[COLORS](norm(error)),
            clip_on=False,
        )
    best = result.best
    axes.plot(within.place(best.settings[name]), best.spread.mean, "o", markersize=8, clip_on=False,
              markerfacecolor="none", markeredgecolor=ORANGE, markeredgewidth=1.6)  # fmt: skip
    for level in (best.spread.mean, best.spread.mean + WITHIN):
        axes.axhline(level, color=GREY, linewidth=0.6, zorder=0)
    axes.set(xlabel=LABELS.get(name, name), ylabel="last test error, %", xlim=(0, 1))
    axes.set_ylim(top=top)
    axes.set_title(f"Error along {LABELS.get(name, name).partition(',')[0]}")
    axes.xaxis.set(major_locator=MaxNLocator(4), major_formatter=_values(within))


def parallel_coordinates(result: Result, axes: Axes) -> None:
    """Draw every trial as a line across one axis per setting and one for the error."""
    ranges, norm = result.space.ranges, _norm(result)
    low, top = norm.vmin or 0.0, norm.vmax or 100.0
    for trial in sorted(result.trials, key=lambda trial: -trial.spread.mean):  # the best on top
        error = min(trial.spread.mean, top)
        places = [of.place(trial.settings[name]) for name, of in ranges.items()]
        color = colormaps[COLORS](norm(error))
        axes.plot([*places, (error - low) / (top - low)], color=color, linewidth=0.9)
    labels = [LABELS.get(name, name).partition(",")[0] for name in ranges]
    axes.set_xticks(range(len(labels) + 1), [*labels, "error, %"])
    axes.set(xlim=(0, len(labels)), ylim=(0, 1), yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    for at in range(len(labels) + 1):
        axes.axvline(at, color=GRID, linewidth=1.0, zorder=0)
    for at, of in enumerate(ranges.values()):
        for place in (0.0, 0.25, 0.5, 0.75, 1.0):
            axes.text(at + 0.02, place, _value(of, place), fontsize="small", va="center")
    for place in (0.0, 0.5, 1.0):
        error = low + place * (top - low)
        beyond = " and more" if place == 1 else ""
        axes.text(len(labels) - 0.02, place, f"{error:.2f}{beyond}", ha="right", fontsize="small",
                  va="center")  # fmt: skip
    axes.set_title("Every trial")
    axes.figure.colorbar(ScalarMappable(norm, COLORS), ax=axes, extend="max", pad=0.02)


def _norm(result: Result) -> Normalize:
    """A scale from the best error to the upper quartile, within reason: what is far is all bad."""
    low = result.best.spread.mean
    span = float(np.quantile([trial.spread.mean for trial in result.trials], 0.75)) - low
    return Normalize(low, low + float(np.clip(span, *SPAN)))


def _values(of: Range) -> FuncFormatter:
    """Name places from 0 to 1 by the values there."""
    return FuncFormatter(lambda place, _: _value(of, float(np.clip(place, 0, 1))))


def _value(of: Range, place: float) -> str:
    return plain_number(float(f"{of.at(place):.2g}"))
