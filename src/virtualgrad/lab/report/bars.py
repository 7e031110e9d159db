"""Panels with what a training step costs: time and memory, a bar per optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from virtualgrad.lab.figures.style import GREY
from virtualgrad.lab.report.colors import color_of
from virtualgrad.lab.report.sections import Section

ROOM = 1.95  # the axis reaches this much beyond the longest bar, for the labels


def step_times(section: Section, axes: Axes) -> None:
    """Draw the mean time of a training step, and its ratio to that of the section's reference."""
    axes.set_title("Time per training step")
    axes.set_xlabel("ms")
    spreads = [cell.ms_per_step for cell in section.cells]
    reference = section.reference
    unit = reference.ms_per_step if reference else None
    labels = []
    for cell, spread in zip(section.cells, spreads, strict=True):
        label = "not measured" if spread is None else f"{spread.mean:#.3g} ms"
        if spread and unit and reference and cell is not reference:
            label += f"  ({spread.mean / unit.mean:.2f} × {reference.title})"
        labels.append(label)
    means = [0.0 if spread is None else spread.mean for spread in spreads]
    deviations = [0.0 if spread is None else spread.sd or 0.0 for spread in spreads]
    _bars(section, axes, means, labels, deviations)


def state_memory(section: Section, axes: Axes) -> None:
    """Draw the memory of the optimizer's state."""
    axes.set_title("Memory of the optimizer's state")
    sizes = [cell.state_bytes for cell in section.cells]
    unit, name = _unit(max(sizes))
    axes.set_xlabel(name)
    _bars(section, axes, [size / unit for size in sizes], [byte_count(size) for size in sizes])


def byte_count(size: int) -> str:
    """A number of bytes as a reader wants it.

    Example:
        >>> byte_count(0), byte_count(1536), byte_count(5 * 2**20)
        ('0 B', '1.5 KiB', '5 MiB')
    """
    unit, name = _unit(size)
    value = size / unit
    return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def _unit(size: int) -> tuple[int, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return 1024**power, name
    return 1, "B"


def _bars(
    section: Section,
    axes: Axes,
    widths: Sequence[float],
    labels: Sequence[str],
    deviations: Sequence[float] = (),
) -> None:
    rows = range(len(section.cells))
    colors = [color_of(cell.optimizer, section.optimizers) for cell in section.cells]
    axes.barh(rows, widths, height=0.62, color=colors)
    for row, deviation in enumerate(deviations):
        if deviation:
            axes.errorbar(widths[row], row, xerr=deviation, color=GREY, elinewidth=0.9, capsize=2.5)
    longest = max(widths) or 1.0
    for row, label in enumerate(labels):
        end = widths[row] + (deviations[row] if deviations else 0.0)
        axes.text(end + 0.03 * longest, row, label, verticalalignment="center")
    axes.set_yticks(rows, [cell.title for cell in section.cells])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, ROOM * longest)
    axes.locator_params(axis="x", nbins=5)
