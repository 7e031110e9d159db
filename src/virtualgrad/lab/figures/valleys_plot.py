"""The first figure: paths of sigma and theta over the valleys, success and Taylor error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from virtualgrad.lab.figures.crossing import Success
from virtualgrad.lab.figures.style import BLUE, GREEN, GREY, ORANGE, WIDTH, name_panels, paper, save
from virtualgrad.lab.figures.taylor import TaylorError
from virtualgrad.lab.figures.valleys import (
    GRADIENT,
    RMSPROP,
    VIRTUAL,
    Method,
    Paths,
    bilinear,
    height,
)

_COLOURS = {GRADIENT: BLUE, RMSPROP: GREEN, VIRTUAL: ORANGE}
_LABELS = {
    GRADIENT: "gradient descent",
    RMSPROP: r"RMSProp (RMS of $\nabla_\theta J$)",
    VIRTUAL: r"virtual gradient descent (RMS of $\nabla_\sigma J$)",
}


def draw_valleys(
    paths: Mapping[Method, Paths],
    success: Sequence[Success],
    errors: Sequence[TaylorError],
    folder: Path,
) -> tuple[Path, Path]:
    """Draw the four panels, and save ``paths.png`` and ``paths.svg``.

    Args:
        paths: one path of each method, all from the same start.
        success: by method and alpha.
        errors: Taylor errors.
        folder: where to save.
    """
    with paper(WIDTH, 6.4) as figure:
        grid = figure.subplots(2, 2)
        sigma_plane, theta_plane, rates, taylor = grid.flat
        for panel, symbol, of in (
            (sigma_plane, r"\sigma", lambda p: p.image),
            (theta_plane, r"\theta", lambda p: p.theta),
        ):
            lines = {method: of(path)[:, 0] for method, path in paths.items()}
            _draw_plane(panel, lines, in_theta=symbol == r"\theta")
            panel.set_xlabel(rf"${symbol}_1$")
            panel.set_ylabel(rf"${symbol}_2$")
        _draw_success(rates, success)
        _draw_errors(taylor, errors)
        name_panels(
            list(grid.flat),
            [
                r"One start: paths of $f(\theta^{(t)})$ over $F(\sigma)$",
                r"The same paths of $\theta^{(t)}$ over $F(f(\theta))$",
                rf"$k={success[0].k:g}$: virtual steps find the deepest valley most often",
                r"$\sigma^{(t)}=f(\theta^{(t)})$ holds up to $O(\alpha^2)$",
            ],
        )
        circles = _draw_first_order(sigma_plane, paths[VIRTUAL])
        handles = [*sigma_plane.lines[: len(paths)], circles]
        labels = [*(_LABELS[method] for method in paths), r"its first-order $\sigma^{(t)}$ in a"]
        figure.legend(handles, labels, loc="outside upper center", ncols=4, columnspacing=1.2)
        return save(figure, folder, "paths")


def _draw_plane(panel: Axes, lines: Mapping[Method, Tensor], *, in_theta: bool) -> None:
    everything = torch.cat(list(lines.values()))
    low, high = everything.min(0).values, everything.max(0).values
    middle = (low + high) / 2
    half = (0.6 * (high - low).max()).clamp(min=1.3 if in_theta else 1.8)  # show several valleys
    axes = [torch.linspace(c - half, c + half, 300).double() for c in middle.tolist()]
    x, y = torch.meshgrid(*axes, indexing="xy")
    # The same contours, drawn where they can be told apart: levels even in log(1 + F).
    z = torch.log1p(height(*(bilinear(x, y) if in_theta else (x, y))))
    panel.contourf(x.numpy(), y.numpy(), z.numpy(), 24, cmap="Greys_r", alpha=0.45)
    panel.contour(x.numpy(), y.numpy(), z.numpy(), 24, colors="black", linewidths=0.15)
    for method, line in lines.items():
        panel.plot(
            *line.T.numpy(), "-o", color=_COLOURS[method], linewidth=0.7, markersize=2, zorder=3
        )
    for method, line in lines.items():
        panel.plot(
            *line[-1].tolist(),
            "*",
            color=_COLOURS[method],
            markeredgecolor="black",
            markeredgewidth=0.6,
            markersize=11,
            zorder=6,
        )
    start = (everything[0, 0].item(), everything[0, 1].item())
    panel.plot(*start, "o", color="black", markersize=5, zorder=5)
    outline = [withStroke(linewidth=2, foreground="white")]
    panel.annotate(
        "start", start, (6, -3), textcoords="offset points", path_effects=outline, zorder=7
    )
    panel.set_aspect("equal")


def _draw_first_order(panel: Axes, paths: Paths) -> Line2D:
    """Circles at the sigma(t) of the first-order iteration, beside f(theta(t))."""
    (circles,) = panel.plot(
        *paths.sigma[1:, 0].T.numpy(),
        "o",
        color=_COLOURS[VIRTUAL],
        markerfacecolor="none",
        markeredgewidth=0.6,
        markersize=4.5,
        zorder=4,
    )
    return circles


def _draw_success(panel: Axes, success: Sequence[Success]) -> None:
    for result in success:
        panel.plot(result.alphas, result.reached, "-o", color=_COLOURS[result.method])
    panel.set_xscale("log")
    panel.set_xlabel(r"learning rate $\alpha$ of the first step")
    panel.set_ylabel(f"fraction of {success[0].starts} starts")
    panel.set_ylim(-0.03, 1.03)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _draw_errors(panel: Axes, errors: Sequence[TaylorError]) -> None:
    for result, marker in zip(errors, "os^", strict=False):
        slope = "zero" if result.slope is None else f"slope {result.slope:.2f}"
        panel.loglog(
            result.alphas,
            result.errors,
            marker,
            color="black",
            markersize=4,
            markerfacecolor="none",
            label=f"{result.label}: {slope}",
        )
        if result.slope is not None:
            anchor = result.errors[0] / result.alphas[0] ** 2
            panel.loglog(
                result.alphas, [anchor * a**2 for a in result.alphas], color=GREY, linewidth=0.8
            )
    panel.set_xlabel(r"learning rate $\alpha$")
    panel.set_ylabel(r"$\|\sigma^{(t+1)}-f(\theta^{(t+1)})\|$")
    panel.legend(loc="center right", bbox_to_anchor=(1, 0.38), title="grey: slope 2")
