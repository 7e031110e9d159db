"""The colours of the optimizers and of the page, for daylight and for the dark."""

from __future__ import annotations

from virtualgrad.lab.figures.style import BLUE, GREEN, GREY, ORANGE, PINK

INK = "#1B1F24"
GRID = "#DFE2E6"

OPTIMIZERS = {"rmsprop": PINK, "adam": GREEN, "sgd": BLUE, "svgd": ORANGE, "released": ORANGE}
OTHERS = ("#8A6D1F", "#5B4FA2", "#2B8C9E", "#8C564B", "#B0305C", "#4C7A34")
"""For other readings and for optimizers of one's own, in the order in which they appear."""

DASHES: dict[str, str | tuple[int, tuple[float, ...]]] = {
    "rmsprop": (0, (1.2, 1.2)),
    "adam": (0, (4, 1.2, 1.2, 1.2)),
    "sgd": (0, (5, 1.5)),
}
"""Curves that stay apart in print without colour; all others are drawn through."""

VARIABLES = {
    INK: ("--ink", "#E6E8EB"),
    GREY: ("--muted", "#A3A9B2"),
    GRID: ("--grid", "#363B42"),
    PINK: ("--rmsprop", "#E39AC5"),
    GREEN: ("--adam", "#2FC79B"),
    BLUE: ("--sgd", "#58B0EA"),
    ORANGE: ("--svgd", "#FF8A4C"),
    OTHERS[0]: ("--other-0", "#D9B74A"),
    OTHERS[1]: ("--other-1", "#A79BF0"),
    OTHERS[2]: ("--other-2", "#5FC6DA"),
    OTHERS[3]: ("--other-3", "#D09A8E"),
    OTHERS[4]: ("--other-4", "#F08CAE"),
    OTHERS[5]: ("--other-5", "#9CCB7F"),
}
"""Colour by daylight -> name of its CSS variable, colour in the dark."""


def color_of(optimizer: str, optimizers: tuple[str, ...]) -> str:
    """The colour of an optimizer among all those of its section."""
    own = [name for name in optimizers if name not in OPTIMIZERS]
    if optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    return OTHERS[own.index(optimizer) % len(OTHERS)]


def css_variables() -> str:
    """The variables for a style sheet, with what they become in the dark."""
    light = "".join(f"{name}:{color};" for color, (name, _) in VARIABLES.items())
    dark = "".join(f"{name}:{color};" for name, color in VARIABLES.values())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
