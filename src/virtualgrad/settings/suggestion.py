"""What :func:`virtualgrad.suggest` found: settings, why, and how large the steps will be."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn

from virtualgrad.optim import SVGD
from virtualgrad.settings.measure import Size

LINE = 100
NONE = "-"
HEADER = (
    "parameter",
    "T",
    "gradient",
    "T(g)'s",
    "ratio",
    "step now",
    "step SVGD",
    "times",
    "r<eps",
)


@dataclass(frozen=True)
class Trials:
    """Mean losses over the batches, before and after a step on each; infinite where it blew up.

    Attributes:
        before: at the weights that the model has.
        current: after a copy was trained by the current optimizer.
        svgd: after a copy was trained by SVGD with the suggested settings.
        tried: scale -> that loss, for every scale that was tried.
    """

    before: float
    current: float
    svgd: float
    tried: dict[float, float]


@dataclass(frozen=True, repr=False)
class Suggestion:
    """Settings of SVGD in place of a working optimizer; print it to see them and why.

    Attributes:
        lr: alpha.
        scale: s, in the units of :meth:`virtualgrad.SVGD.released`.
        weight_decay: decoupled, so that a step takes away what it takes away now.
        reasons: what was chosen and why, in short sentences.
        sizes: how large gradient, virtual gradient (with s = 1) and step are, for each parameter.
        trials: the losses when copies of the model were trained on the batches.
        batches: how many batches there were.
        current: what the current optimizer is called.
    """

    lr: float
    scale: float
    weight_decay: float
    reasons: tuple[str, ...]
    sizes: tuple[Size, ...]
    trials: Trials
    batches: int
    current: str

    @property
    def kwargs(self) -> dict[str, float]:
        """The settings, as ``SVGD.released(model, **suggestion.kwargs)`` takes them."""
        decay = {"weight_decay": self.weight_decay} if self.weight_decay else {}
        return {"lr": self.lr, "scale": self.scale, **decay}

    def optimizer(self, model: nn.Module, **options: Any) -> SVGD:
        """SVGD (as released) on a model with these settings; further options override them."""
        return SVGD.released(model, **{**self.kwargs, **options})

    def step(self, size: Size) -> float:
        """Norm of SVGD's step at a parameter: lr |V| s where T acts, lr |gradient| elsewhere."""
        return self.lr * (size.gradient if size.virtual is None else self.scale * size.virtual)

    def __str__(self) -> str:
        """Settings, reasons and the table."""
        settings = ", ".join(f"{name}={value:g}" for name, value in self.kwargs.items())
        lines = [f"SVGD.released(model, {settings})  # in place of {self.current}", ""]
        for reason in self.reasons:
            lines += textwrap.wrap(reason, LINE, initial_indent="- ", subsequent_indent="  ")
        return "\n".join([*lines, "", *self._table()])

    __repr__ = __str__

    def _table(self) -> list[str]:
        """A line per parameter, steps as a share of the weight."""
        rows = [HEADER, *(self._row(size) for size in self.sizes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        texts = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        note = (
            f"Norms, root mean square over {self.batches} batches. T(g)'s: the pull-back of T(g), "
            "which SVGD descends along; ratio: to the gradient. Steps are shares of the weight's "
            "norm, times is SVGD's over the current one. r<eps: where T is nearly linear in g."
        )
        return [texts[0], "-" * len(texts[0]), *texts[1:], "", *textwrap.wrap(note, LINE)]

    def _row(self, size: Size) -> tuple[str, ...]:
        acts = size.virtual is not None
        virtual = self.scale * size.virtual if size.virtual is not None else size.gradient
        step = self.step(size)
        return (
            size.name,
            "T" if acts else NONE,
            f"{size.gradient:.2g}",
            f"{virtual:.2g}" if acts else NONE,
            f"{virtual / size.gradient:.2g}" if acts else NONE,
            _share(size.step, size.weight),
            _share(step, size.weight),
            f"{step / size.step:.2g}" if size.step else NONE,
            f"{100 * size.linear:.0f} %" if size.linear is not None else NONE,
        )


def _share(step: float, weight: float) -> str:
    return f"{step / weight:.1e}" if weight else NONE
