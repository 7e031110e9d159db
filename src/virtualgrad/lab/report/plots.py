"""The plots of a section: error and loss along the run, and what a step costs.

A plot is a row of panels. A panel is a function that draws on given axes, so that the same drawing
serves a file with all panels side by side and a page that stacks them on a narrow screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from virtualgrad.lab.report.bars import state_memory, step_times
from virtualgrad.lab.report.curves import end_of_run, paper_marks, whole_run
from virtualgrad.lab.report.sections import Section

Panel = Callable[[Axes], None]


@dataclass(frozen=True)
class Plot:
    """Panels that belong together.

    Attributes:
        name: Of its files, without the ending.
        title: What was trained on what.
        alt: What there is to see, for those who cannot.
        caption: How to read it.
        panels: Draw one panel each.
        legend: Whether the optimizers are told apart by a legend.
        height: In inches.
    """

    name: str
    title: str
    alt: str
    caption: str
    panels: tuple[Panel, ...]
    legend: bool
    height: float


def plots_of(section: Section) -> list[Plot]:
    """The plots of a section, in the order of the page."""
    reading = _reading(section)
    triangles = " Triangles at the edge are the paper's lowest errors."
    return [
        Plot(
            name=f"error-{section.name}",
            title=section.title,
            alt=f"Test error against training step, {section.title}",
            caption=reading + (triangles if paper_marks(section) else ""),
            panels=(partial(whole_run, section, "test_error"), partial(end_of_run, section)),
            legend=True,
            height=3.0,
        ),
        Plot(
            name=f"loss-{section.name}",
            title=section.title,
            alt=f"Training and test loss against training step, {section.title}",
            caption=f"Cross-entropy, without the L1 penalty. {reading}",
            panels=(
                partial(whole_run, section, "train_loss"),
                partial(whole_run, section, "test_loss"),
            ),
            legend=True,
            height=3.0,
        ),
        Plot(
            name=f"cost-{section.name}",
            title=section.title,
            alt=f"Time per step and memory of the optimizer's state, {section.title}",
            caption=_cost_caption(section),
            panels=(partial(step_times, section), partial(state_memory, section)),
            legend=False,
            height=0.9 + 0.3 * len(section.cells),
        ),
    ]


def _reading(section: Section) -> str:
    counts = sorted({len(cell.runs) for cell in section.cells})
    if counts == [1]:
        reading = "Each line is a single run"
    else:
        seeds = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        reading = f"Lines are means over {seeds} seeds, bands one standard deviation either side"
    if section.milestones:
        reading += "; thin vertical lines mark changes of the learning rate"
    return f"{reading}."


def _cost_caption(section: Section) -> str:
    caption = (
        "Time of a training step, evaluation left out (whiskers: one standard deviation over "
        "seeds), and the memory that the optimizer keeps between steps."
    )
    devices = sorted({str(run.environment.get("device")) for run in section.runs})
    if len(devices) > 1:
        caption += f" The times are from different hardware: {', '.join(devices)}."
    return caption
