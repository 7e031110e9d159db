"""The numbers of the figures, as tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from virtualgrad.lab.figures.crossing import Success
from virtualgrad.lab.figures.decrease import Sweep
from virtualgrad.lab.figures.isotropy import Isotropy
from virtualgrad.lab.figures.matrices import Law
from virtualgrad.lab.figures.taylor import TaylorError


def show(table: Table) -> None:
    """Print a table."""
    Console().print(table)


def saved(files: tuple[Path, Path]) -> None:
    """Say where the picture is."""
    console = Console(soft_wrap=True)
    for file in files:
        console.print(f"saved {file}", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in _NAMES else "right", no_wrap=True)
    return table


_NAMES = {"T", "method", "f"}


def isotropy(results: Sequence[Isotropy], law: Law, pairs: int, matrices: int) -> Table:
    """c0 by n and lambda."""
    title = f"f(v, u) = c0 v.u: {law} law, {pairs} pairs, {matrices:,} matrices each"
    table = _table(title, "n", "m", "lambda", "c0 fitted", "c0 trace", "c0 exact", "R^2")
    for index, result in enumerate(results):
        exact = "-" if result.exact is None else f"{result.exact:.4f}"
        last_of_its_n = index + 1 == len(results) or results[index + 1].n != result.n
        table.add_row(
            str(result.n),
            str(result.m),
            f"{result.lam:g}",
            f"{result.fit.slope:.4f} ± {result.fit.error:.4f}",
            f"{result.trace:.4f}",
            exact,
            f"{result.fit.r_squared:.5f}",
            end_section=last_of_its_n,
        )
    return table


def decrease(sweeps: Sequence[Sweep]) -> Table:
    """How often and how much in one setting, at powers of ten and in the limit of small alpha."""
    title = f"One step, {sweeps[0].setting}: {sweeps[0].trials:,} trials for each T and alpha"
    table = _table(title, "T", "alpha", "lowered %", "mean change", "/ corollary")
    for sweep in sweeps:
        table.add_row(
            sweep.label,
            "-> 0",
            f"{100 * sweep.downhill:.1f}      ",
            "",
            f"{sweep.slope:.3f} ± {sweep.slope_error:.3f}",
        )
        shown = [step for step in sweep.steps if _is_power_of_ten(step.alpha)]
        for step in shown:
            table.add_row(
                "",
                f"{step.alpha:g}",
                f"{100 * step.lowered:.1f} ± {100 * step.lowered_error:.1f}",
                f"{step.change:+.1e} ± {step.change_error:.0e}",
                f"{step.ratio:.3f} ± {step.ratio_error:.3f}",
                end_section=step is shown[-1],
            )
    return table


def _is_power_of_ten(alpha: float) -> bool:
    return float(f"{alpha:.0e}") == float(f"{alpha:.6e}") and f"{alpha:.0e}".startswith("1")


def crossing(success: Sequence[Success]) -> Table:
    """Best fraction of starts that end in the deepest valley, by steepness k and method."""
    title = f"{success[0].starts} starts: % that end in the deepest valley, and at which alpha"
    steepness = list(dict.fromkeys(result.k for result in success))
    table = _table(title, "method", *(f"k = {k:.3g}" for k in steepness))
    for method in dict.fromkeys(result.method for result in success):
        best = [result.best for result in success if result.method == method]
        table.add_row(method.name, *(f"{100 * part:.0f} at {alpha:.2g}" for alpha, part in best))
    return table


def taylor(errors: Sequence[TaylorError]) -> Table:
    """Taylor error by alpha, and the slope."""
    alphas = [alpha for alpha in errors[0].alphas if _is_power_of_ten(alpha)]
    title = "Taylor error of one virtual step by alpha; log-log slope"
    table = _table(title, "f", *(f"{alpha:g}" for alpha in alphas), "slope")
    for result in errors:
        by_alpha = dict(zip(result.alphas, result.errors, strict=True))
        slope = "none" if result.slope is None else f"{result.slope:.3f}"
        table.add_row(result.label, *(f"{by_alpha[a]:.1e}" for a in alphas), slope)
    return table
