"""The theorem's figure: how often and how much one step lowers the loss, against alpha."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from virtualgrad.lab.figures.decrease import Sweep
from virtualgrad.lab.figures.decrease_networks import Labels
from virtualgrad.lab.figures.style import BLUE, GREEN, GREY, ORANGE, WIDTH, name_panels, paper, save

_COLOURS = (BLUE, ORANGE, GREEN)
_DASHED = (0, (3.5, 1.5))


def draw_decrease(
    jacobians: Sequence[Sweep], networks: Sequence[Sweep], folder: Path
) -> tuple[Path, Path]:
    """Draw both settings, and save ``theorem.png`` and ``theorem.svg``."""
    with paper(WIDTH, 4.9) as figure:
        grid = figure.subplots(2, 2, sharex="row")
        for (often, much), sweeps in zip(grid, (jacobians, networks), strict=True):
            colours = _colours(sweeps)
            for sweep in sweeps:
                look = {
                    "color": colours[sweep.label],
                    "linestyle": _DASHED if sweep.setting == Labels.RANDOM else "-",
                }
                _draw(often, sweep, "lowered", look)
                _draw(much, sweep, "ratio", look)
            _label_axes(often, much)
            _add_legend(often, colours)
        grid[1, 1].legend(
            handles=[
                Line2D([], [], color=GREY, linestyle="-", label="learnable labels"),
                Line2D([], [], color=GREY, linestyle=_DASHED, label="random labels"),
            ],
            loc="upper right",
        )
        name_panels(
            grid.flat,
            [
                "Random Jacobians: most small steps lower the loss",
                "Random Jacobians: the mean is as predicted",
                "Random MLPs: small steps lower the loss",
                "Random MLPs: the mean is as predicted, or better",
            ],
        )
        return save(figure, folder, "theorem")


def _colours(sweeps: Sequence[Sweep]) -> dict[str, str]:
    labels = dict.fromkeys(sweep.label for sweep in sweeps)
    return dict(zip(labels, _COLOURS, strict=False))


def _draw(panel: Axes, sweep: Sweep, quantity: str, look: dict[str, Any]) -> None:
    panel.errorbar(
        [step.alpha for step in sweep.steps],
        [getattr(step, quantity) for step in sweep.steps],
        [getattr(step, f"{quantity}_error") for step in sweep.steps],
        marker="o",
        markeredgecolor="white",
        markeredgewidth=0.5,
        markersize=4.5,
        elinewidth=0.8,
        **look,
    )


def _label_axes(often: Axes, much: Axes) -> None:
    for panel in (often, much):
        panel.set_xscale("log")
        panel.set_xlabel(r"learning rate $\alpha$")
    often.set_ylabel("steps that lower the loss")
    often.set_ylim(-0.03, 1.05)
    often.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    much.set_ylabel(r"mean change $/\,(-\alpha\,c_0\,g^\top\mathcal{T}g)$")
    much.set_ylim(bottom=-0.5)
    much.text(0.99, 1.03, "corollary", color=GREY, ha="right", transform=much.get_yaxis_transform())
    much.axhline(1, color=GREY, linewidth=0.7, zorder=0)
    much.axhline(0, color="0.85", linewidth=0.7, zorder=0)


def _add_legend(panel: Axes, colours: dict[str, str]) -> None:
    handles = [
        Line2D([], [], color=colour, marker="o", label=label) for label, colour in colours.items()
    ]
    panel.legend(handles=handles, loc="lower left", title=r"$\mathcal{T}$", alignment="left")
