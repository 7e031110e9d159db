"""The lemma's figure: f_lambda(v, u) against v.u, one panel for each n."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from virtualgrad.lab.figures.isotropy import Isotropy
from virtualgrad.lab.figures.matrices import Law
from virtualgrad.lab.figures.style import BLUE, GREEN, ORANGE, PINK, WIDTH, name_panels, paper, save

_LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PINK, "D"))


def draw_isotropy(results: Sequence[Isotropy], law: Law, folder: Path) -> tuple[Path, Path]:
    """Draw points and fitted lines, and save ``lemma.png`` and ``lemma.svg``."""
    sizes = list(dict.fromkeys(result.n for result in results))
    lams = list(dict.fromkeys(result.lam for result in results))
    looks = {lam: _LOOKS[i % len(_LOOKS)] for i, lam in enumerate(lams)}
    edge = 1.05 * max(abs(x) for result in results for x in result.dots)
    top = edge * max(abs(result.fit.slope) for result in results)
    with paper(max(WIDTH * len(sizes) / 3, 3.4), 2.95) as figure:
        panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
        for result in results:
            panel, (colour, marker) = panels[sizes.index(result.n)], looks[result.lam]
            fit = result.fit
            line = [-edge * fit.slope, edge * fit.slope]
            panel.plot([-edge, edge], line, color=colour, linewidth=0.9)
            panel.plot(
                result.dots,
                result.estimates,
                marker,
                color=colour,
                markersize=3.8,
                markeredgecolor="white",
                markeredgewidth=0.4,
                label=rf"$\lambda={result.lam:g}$:  $c_0={fit.slope:.4f}$, "
                rf" $R^2={fit.r_squared:.5f}$",
            )
        for panel in panels:
            panel.set_xlim(-edge, edge)
            panel.set_xlabel(r"$v^\top u$")
            panel.axhline(0, color="0.85", linewidth=0.6, zorder=0)
            panel.axvline(0, 0, 0.7, color="0.85", linewidth=0.6, zorder=0)
            panel.set_ylim(-top, 1.75 * top)  # room for the legend
            panel.legend(loc="upper left", handletextpad=0.1, borderaxespad=0.1, labelspacing=0.3)
        panels[0].set_ylabel(r"estimate of $f_\lambda(v,u)$")
        name_panels(panels, [_title(n, results) for n in sizes])
        figure.suptitle(
            r"$f_\lambda(v,u)=\mathrm{E}[v^\top M^\top M u\;|\;\Vert M\Vert_2=\lambda]$"
            rf"  is proportional to  $v^\top u$   ({law} law)",
            fontsize=10.5,
        )
        return save(figure, folder, "lemma")


def _title(n: int, results: Sequence[Isotropy]) -> str:
    result = next(result for result in results if result.n == n)
    shape = rf"$M$: ${result.m} \times {n}$"
    if result.exact is None:
        return shape
    return rf"{shape},  exactly $c_0={result.exact / result.lam**2:.4f}\,\lambda^2$"
