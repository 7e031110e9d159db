"""An explanation as a table, in plain text and in HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from virtualgrad.sites import Site

if TYPE_CHECKING:
    from virtualgrad.explain.explanation import Explanation

HEADER = ("sigma", "op", "parameters", "linear", "T", "shape", "sample axis", "state")
WIDEST = 48
LINE = 100
MOST_FOLDED = 4


def as_text(explanation: Explanation) -> str:
    """The table with aligned columns, the totals, and what no T acts on."""
    rows = [[_shortened(cell) for cell in row] for row in [list(HEADER), *_rows(explanation)]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [_aligned(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *_totals(explanation)]
    for reason, names in _uncovered_by_reason(explanation).items():
        lines += ["", *_wrapped(f"No T on {_count(len(names), 'parameter')}: {reason}")]
        lines += _wrapped(_folded_by_owner(names), indent="  ")
    return "\n".join(line.rstrip() for line in lines)


def as_html(explanation: Explanation) -> str:
    """The same as HTML."""
    rows = "".join(_html_row("td", row) for row in _rows(explanation))
    totals = "<br>".join(escape(line) for line in _totals(explanation))
    uncovered = "".join(
        f"<li>{escape(reason)}: <code>{escape(_folded_by_owner(names))}</code></li>"
        for reason, names in _uncovered_by_reason(explanation).items()
    )
    return (
        f"<table><thead>{_html_row('th', HEADER)}</thead><tbody>{rows}</tbody></table>"
        f"<p>{totals}</p>" + (f"<p>No T on:</p><ul>{uncovered}</ul>" if uncovered else "")
    )


def _rows(explanation: Explanation) -> list[list[str]]:
    transformed = {site.key: site for site in explanation.transformed}
    return [
        _row(site, transformed.get(site.key), explanation.share_positions)
        for site in explanation.sites
    ]


def _row(site: Site, transformed: Site | None, share_positions: bool) -> list[str]:
    if transformed is None:
        acts, state = "-", "-"
    else:
        all_chosen = transformed.parameters == site.parameters
        acts = "yes" if all_chosen else " ".join(_last_parts(transformed.parameters))
        state = f"{transformed.state_elements(share_positions):,}"
    return [
        site.key,
        site.op,
        _folded(site.parameters),
        "yes" if site.linear else "no",
        acts,
        _shape(site.shape),
        _sample_axis(site),
        state,
    ]


def _sample_axis(site: Site) -> str:
    """The axis; with the shape in which it is counted, where samples and positions share one."""
    layout = site.layout
    if layout.sample_axis is None:
        return "-"
    folded = layout.view != site.shape
    return f"{layout.sample_axis} of {_shape(layout.view)}" if folded else str(layout.sample_axis)


def _totals(explanation: Explanation) -> list[str]:
    found = explanation
    acting, sigmas = len(found.transformed), _count(len(found.sites), "sigma")
    shared = ", averaged over positions" if found.share_positions else ""
    return [
        f"{found.model}: {_count(len(found.parameters), 'parameter')} with "
        f"{_count(found.parameter_elements, 'number')}; T acts at {acting:,} of {sigmas}.",
        f"r holds {_count(found.state_elements, 'number')}{shared}: "
        f"{_percent(found.state_elements, found.rmsprop_elements)} of RMSProp's state "
        f"({found.rmsprop_elements:,}), "
        f"{_percent(found.state_elements, found.adam_elements)} of Adam's "
        f"({found.adam_elements:,}).",
    ]


def _uncovered_by_reason(explanation: Explanation) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, reason in explanation.uncovered.items():
        grouped.setdefault(reason, []).append(name)
    return grouped


def _folded(names: Sequence[str]) -> str:
    """``a.weight, a.bias`` -> ``a.{weight,bias}``."""
    owners = {name.rpartition(".")[0] for name in names}
    if not 1 < len(names) <= MOST_FOLDED or len(owners) > 1 or owners == {""}:
        return ", ".join(names)
    return f"{owners.pop()}.{{{','.join(_last_parts(names))}}}"


def _folded_by_owner(names: Iterable[str]) -> str:
    owners = groupby(names, key=lambda name: name.rpartition(".")[0])
    return ", ".join(_folded(list(own)) for _, own in owners)


def _last_parts(names: Iterable[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape) or "scalar"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _shortened(text: str) -> str:
    """Leave out the middle of a cell that would make the whole table wide."""
    if len(text) <= WIDEST:
        return text
    half = (WIDEST - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        LINE,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,  # names of parameters stay whole
        break_on_hyphens=False,
    )


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    *texts, number = row
    cells = [cell.ljust(width) for cell, width in zip(texts, widths, strict=False)]
    return "  ".join([*cells, number.rjust(widths[-1])])


def _html_row(tag: str, row: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"
