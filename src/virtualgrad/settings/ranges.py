"""What :func:`virtualgrad.range_test` found: the loss while the learning rate grew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from virtualgrad.settings import plot

MARGIN = 10.0
"""A rate to train with lies so many times below the one at which the loss was lowest."""


class Best(NamedTuple):
    """Settings of SVGD, as ``SVGD.released(model, *best)`` takes them."""

    lr: float
    scale: float


@dataclass(frozen=True)
class RangeCurve:
    """The loss while lr grew, at one scale.

    Attributes:
        scale: s.
        lr: alpha at each step; it is the step after which it blew up that is missing.
        loss: of each step's batch, before the step.
        smoothed: its running mean.
        diverged: whether the loss blew up before the last rate.
    """

    scale: float
    lr: tuple[float, ...]
    loss: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool

    @property
    def lowest(self) -> float:
        """The lowest smoothed loss."""
        return min(self.smoothed)

    @property
    def lr_lowest(self) -> float:
        """The rate at which the smoothed loss was lowest."""
        return self.lr[self.smoothed.index(self.lowest)]

    @property
    def has_minimum(self) -> bool:
        """Whether the loss was lowest inside the range, and not at one of its ends."""
        at = self.smoothed.index(self.lowest)
        return at > 0 and (at < len(self.smoothed) - 1 or self.diverged)

    @property
    def lr_suggested(self) -> float:
        """A tenth of it, a usual choice: a rate that is kept must be safer than one passed by."""
        return self.lr_lowest / MARGIN

    @property
    def lr_diverged(self) -> float | None:
        """The last rate before the loss blew up; None if it never did."""
        return self.lr[-1] if self.diverged else None


@dataclass(frozen=True, repr=False)
class RangeTest:
    """The curves of a range test; print it for a table, or :meth:`plot` it.

    Attributes:
        curves: one for each scale, in the order given.
    """

    curves: tuple[RangeCurve, ...]

    @property
    def best(self) -> Best:
        """Settings to begin with: of the curve that came lowest, a tenth of its best rate."""
        curve = min(self.curves, key=lambda one: one.lowest)
        return Best(curve.lr_suggested, curve.scale)

    def table(self) -> list[dict[str, Any]]:
        """A row per scale, as plain data (``pandas.DataFrame(result.table())``)."""
        return [
            {
                "scale": curve.scale,
                "lowest loss": curve.lowest,
                "lr there": curve.lr_lowest,
                "lr suggested": curve.lr_suggested,
                "diverged at lr": curve.lr_diverged,
            }
            for curve in self.curves
        ]

    def plot(self, ax: Any = None) -> Any:
        """Draw the curves with matplotlib.

        Args:
            ax: matplotlib axes to draw into; new ones if None.

        Returns:
            The axes.

        Raises:
            MatplotlibMissingError: It is not installed.
        """
        return plot.draw(self.curves, self.best, ax)

    def __str__(self) -> str:
        """The table, and the best settings."""
        rows = self.table()
        header = list(rows[0])
        cells = [header, *([_number(row[name]) for name in header] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in cells
        ]
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join(
            [*lines, "", f"best: lr={self.best.lr:.2g}, scale={self.best.scale:g}", *self._doubts()]
        )

    def _doubts(self) -> list[str]:
        """What speaks against the best settings, in a sentence each."""
        curve = min(self.curves, key=lambda one: one.lowest)
        if curve.lr_lowest == curve.lr[0]:
            return [
                "The loss only grew: no rate of this range lowers it. Take a smaller lr_min, more "
                "steps, or a model that is not trained yet."
            ]
        if not curve.has_minimum:
            return ["The loss still fell at the last rate: take a larger lr_max."]
        return []

    __repr__ = __str__


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
