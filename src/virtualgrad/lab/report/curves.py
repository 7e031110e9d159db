"""Panels with learning curves: the whole run, and its end on a scale of its own."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib import ticker
from matplotlib.axes import Axes

from virtualgrad.lab.figures.style import GREY
from virtualgrad.lab.report.bands import Band, Quantity, band, limits, near_best
from virtualgrad.lab.report.colors import DASHES, GRID, color_of
from virtualgrad.lab.report.sections import Section

OPENING = 0.05  # share of the run that the scale leaves out: there errors fall from 90 percent
CLOSING = 0.4  # share of the run in the close view, where no change of learning rate sets it
FAR = (6.0, 0.3)  # ratio to the best, and slack, beyond which an end is out of view
FAR_AT_END = (2.0, 1.0)
FEWEST = 3  # evaluations that make a curve
LABELS: dict[Quantity, str] = {
    "test_error": "test error, %",
    "train_loss": "training loss",
    "test_loss": "test loss",
}


def whole_run(section: Section, quantity: Quantity, axes: Axes) -> None:
    """Draw a quantity over the whole run, on a logarithmic scale, its steep opening cropped."""
    bands = {cell.optimizer: band(cell, quantity) for cell in section.cells}
    near = near_best(bands, *FAR)
    _draw(section, bands, axes)
    _name_far(section, near, axes)
    axes.set_title(f"{LABELS[quantity].removesuffix(', %')}, whole run".capitalize())
    axes.set_ylabel(LABELS[quantity])
    axes.set_xlim(0, section.steps)
    low, high = limits(b.after(OPENING * section.steps) for b in near.values())
    if 0 < 2 * low < high:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_ylim(low / 1.06, high * 1.06 or 1.0)


def end_of_run(section: Section, axes: Axes) -> None:
    """Draw the test error behind the last change of the learning rate, with the paper's figures.

    Optimizers that end far from the best are named, and the scale leaves them out.
    """
    begin = _last_phase(section)
    bands = {cell.optimizer: band(cell, "test_error").after(begin) for cell in section.cells}
    near = near_best(bands, *FAR_AT_END)
    _draw(section, bands, axes)
    _name_far(section, near, axes)
    axes.set_title("Test error, end of the run")
    axes.set_ylabel(LABELS["test_error"])
    paper = {name: error for name, error in paper_marks(section).items() if name in near}
    for name, error in paper.items():
        axes.plot(
            1.0,
            error,
            marker="<",
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            color=color_of(name, section.optimizers),
            transform=axes.get_yaxis_transform(),
            clip_on=False,
            linestyle="none",
        )
    shown = [*limits(near.values()), *paper.values()]
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    steps = next(iter(near.values())).steps
    axes.set_xlim(steps[0] if len(steps) > 1 else begin, section.steps)


def paper_marks(section: Section) -> dict[str, float]:
    """The paper's figure for each optimizer, where it may be compared with."""
    if section.caveats:
        return {}
    return {name: error for name, error in section.paper.items() if section.cell(name)}


def _last_phase(section: Section) -> float:
    """The last change of the learning rate, if there is enough to see behind it."""
    late = (1 - CLOSING) * section.steps
    begin = max(section.milestones, default=late)
    evaluations = sum(step > begin for step in section.runs[0].curve.step)
    return begin if evaluations >= FEWEST else min(begin, late)


def _draw(section: Section, bands: Mapping[str, Band], axes: Axes) -> None:
    for step in section.milestones:
        axes.axvline(step, color=GREY, linewidth=0.6, linestyle=(0, (1, 2)), zorder=1)
    for cell in section.cells:
        drawn = bands[cell.optimizer]
        color = color_of(cell.optimizer, section.optimizers)
        axes.fill_between(
            drawn.steps, drawn.low, drawn.high, color=color, alpha=0.16, linewidth=0, zorder=2
        )
        axes.plot(
            drawn.steps,
            drawn.mean,
            label=cell.title,
            color=color,
            linestyle=DASHES.get(cell.optimizer, "solid"),
            marker="" if len(drawn.steps) > 1 else "o",
            linewidth=1.8 if cell.optimizer == "svgd" else 1.3,
            zorder=3,
        )
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _name_far(section: Section, near: Mapping[str, Band], axes: Axes) -> None:
    far = [cell.title for cell in section.cells if cell.optimizer not in near]
    if far:
        note = f"out of view: {', '.join(far)}"
        axes.set_title(note, loc="right", color=GREY, fontsize="small")
