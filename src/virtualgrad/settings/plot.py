"""The picture of a range test. matplotlib is imported when it is drawn, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from virtualgrad.errors import VirtualGradError

if TYPE_CHECKING:
    from virtualgrad.settings.ranges import Best, RangeCurve

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, whose colours stay apart for colour-blind readers."""

HEADROOM = 0.35
"""Above the highest start of a curve, as a share of the drop from there to the lowest loss."""


class MatplotlibMissingError(VirtualGradError, ImportError):
    """A plot was asked for where matplotlib is not installed."""


def draw(curves: Sequence[RangeCurve], best: Best, ax: Any = None) -> Any:
    """Smoothed loss over lr, a line per scale; where each was lowest, where it blew up, the best.

    Args:
        curves: one for each scale.
        best: lr and scale to mark.
        ax: axes to draw into; new ones if None.

    Returns:
        The axes.
    """
    ax = _axes() if ax is None else ax
    low = min(curve.lowest for curve in curves)
    start = max(curve.smoothed[0] for curve in curves)
    height = start - low or abs(start) or 1.0
    top = start + HEADROOM * height
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        ax.plot(curve.lr, curve.loss, color=colour, alpha=0.18, linewidth=0.8)
        ax.plot(curve.lr, curve.smoothed, color=colour, label=f"{curve.scale:g}", linewidth=1.8)
        ax.plot(curve.lr_lowest, curve.lowest, "o", color=colour, markersize=5)
        if curve.diverged:
            end = min(curve.smoothed[-1], top)
            ax.plot(curve.lr[-1], end, "x", color=colour, markersize=8, markeredgewidth=2)
        if curve.scale == best.scale:
            _mark_best(ax, curve, best, colour, top)
    ax.set_xscale("log")
    ax.set_ylim(low - 0.08 * height, top + 0.03 * height)
    ax.set_xlabel("lr (α), growing from step to step")
    ax.set_ylabel("loss, smoothed")
    ax.set_title("● lowest   ★ a tenth of the rate there   ✕ blew up", loc="left", fontsize="small")
    ax.legend(title="scale (s)", frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _mark_best(ax: Any, curve: RangeCurve, best: Best, colour: str, top: float) -> None:
    """A star on the curve, and its numbers beside a line, on the side that has more room."""
    at = min(range(len(curve.lr)), key=lambda k: abs(curve.lr[k] - best.lr))
    to_the_left = at > len(curve.lr) / 2
    ax.axvline(best.lr, color=colour, linestyle=":", linewidth=1.2, zorder=1)
    ax.plot(best.lr, curve.smoothed[at], "*", color=colour, markersize=14, zorder=5)
    ax.annotate(
        f"begin with\nlr={best.lr:.2g}, scale={best.scale:g}",
        (best.lr, top),
        xytext=(-6 if to_the_left else 6, 0),
        textcoords="offset points",
        color=colour,
        ha="right" if to_the_left else "left",
        va="top",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )


def _axes() -> Any:
    try:
        from matplotlib import pyplot  # noqa: PLC0415 - the library itself is torch alone
    except ImportError as error:
        raise MatplotlibMissingError.of(
            given="plot() without matplotlib",
            allowed="matplotlib, which the extra virtualgrad[lab] brings",
            todo="pip install matplotlib, or print the result for a table",
        ) from error
    _, ax = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    return ax
