"""A picture in Graphviz's language, in the colours of the paper's figures."""

from __future__ import annotations

from html import escape

from virtualgrad.explain.picture import Edge, Picture, Value

T_COLOUR = "#c2185b"
EDGE_COLOUR = "#8a8f98"
T_LOOK = (
    f'label=" T ", fontname="Helvetica-Bold", fontcolor="{T_COLOUR}", color="{T_COLOUR}", '
    "style=bold, penwidth=2.2"
)

STYLES = {  # kind of value: (shape, fill, line)
    "parameter": ("ellipse", "#ffe0b2", "#f57c00"),
    "sigma": ("box", "#b2dfdb", "#00796b"),
    "value": ("box", "#f3f4f6", "#9aa0a6"),
    "input": ("ellipse", "#f3f4f6", "#9aa0a6"),
    "output": ("ellipse", "#e1bee7", "#7b1fa2"),
}
LEGEND = {  # kind of value: what it means
    "parameter": "parameter θ",
    "sigma": "σ, made by an op that takes θ",
    "value": "other value",
    "output": "output",
}


def dot_text(picture: Picture, *, title: str) -> str:
    """The picture as text; the same picture always gives the same text."""
    lines = [
        f"digraph {_quoted(title)} {{",
        '  graph [rankdir=TB, nodesep=0.2, ranksep=0.35, fontname="Helvetica", fontsize=11,',
        f"         labelloc=b, label=<{_legend(title)}>]",
        '  node [fontname="Helvetica", fontsize=10, margin="0.12,0.06", height=0.3, penwidth=1.2]',
        f'  edge [fontname="Helvetica", fontsize=10, arrowsize=0.6, color="{EDGE_COLOUR}"]',
        *(_node(value) for value in picture.values),
        *(_edge(edge) for edge in picture.edges),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _node(value: Value) -> str:
    shape, fill, line = STYLES[value.kind]
    style = "filled" if shape == "ellipse" else "rounded,filled"
    label = _quoted(f"{value.title}\n{shape_text(value.shape)}")
    look = f'shape={shape}, style="{style}", fillcolor="{fill}", color="{line}"'
    return f"  {value.id} [label={label}, {look}]"


def _edge(edge: Edge) -> str:
    if edge.transformed:
        return f"  {edge.source} -> {edge.target} [{T_LOOK}]"
    # Heavy edges are drawn short and straight: the chain of values goes down, parameters beside.
    weight = "" if edge.source.startswith("theta") else " [weight=20]"
    return f"  {edge.source} -> {edge.target}{weight}"


def _legend(title: str) -> str:
    cells = [f"<TD><B>{escape(title)}</B></TD>"]
    for kind, meaning in LEGEND.items():
        _, fill, line = STYLES[kind]
        cells.append(f'<TD STYLE="ROUNDED" BGCOLOR="{fill}" COLOR="{line}">{meaning}</TD>')
    cells.append(
        f'<TD><FONT COLOR="{T_COLOUR}"><B>T</B>: θ gets the pull-back of T(g), not of g</FONT></TD>'
    )
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="6"><TR>{"".join(cells)}</TR></TABLE>'


def shape_text(shape: tuple[int, ...]) -> str:
    """``(8, 256)`` -> ``"8 × 256"``; a scalar is a number."""
    return " × ".join(str(size) for size in shape) or "scalar"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
