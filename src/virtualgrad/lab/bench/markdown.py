"""The results in Markdown: a line per network, format and mode; optimizers side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from virtualgrad.lab.bench.methods import METHODS, REFERENCE
from virtualgrad.lab.bench.modes import MODES
from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.bench.table import failures
from virtualgrad.lab.bench.titles import (
    NONE,
    by_case,
    by_model,
    method_title,
    methods_of,
    network_title,
    of_peers,
    ratio,
    three_digits,
)
from virtualgrad.lab.report.readme import marks

PLACE, SHORT = "bench", "bench-short"
"""Names of the places for it in a Markdown file: for all of it, and for what a README has room."""


def bench_blocks(rows: Sequence[Row], environment: dict[str, Any], text: str) -> dict[str, str]:
    """What belongs into a Markdown file, by its places: the tables, or those of a README."""
    if marks(SHORT)[0] in text:
        return {SHORT: short_markdown(rows, environment)}
    return {PLACE: bench_markdown(rows, environment)}


def short_markdown(rows: Sequence[Row], environment: dict[str, Any]) -> str:
    """The device's own time, in bfloat16."""
    chosen = [
        row for row in rows if MODES[row.mode].graphed and row.dtype == "bf16" and not of_peers(row)
    ]
    title = "Time of a step over SGD's, bfloat16, in a CUDA graph (in parentheses the floor):"
    return "\n\n".join([_provenance(chosen, environment), title, _times(chosen)]) + "\n"


def bench_markdown(rows: Sequence[Row], environment: dict[str, Any]) -> str:
    """Tables of time and memory, of the peers where they were measured, and what failed."""
    ours = [row for row in rows if not of_peers(row)]
    peers = [row for row in rows if of_peers(row)]
    blocks = [_provenance(rows, environment)]
    if ours:
        blocks += ["Time of a step over SGD's (in parentheses the floor):", _times(ours)]
        if any(row.peak_bytes is not None for row in ours):
            blocks += ["Peak memory of an eager step over SGD's:", _peaks(ours)]
        blocks += ["State of the optimizer, bytes per parameter:", _states(ours)]
    if peers:
        blocks += ["Other libraries on the same work, time over SGD's:", _times(peers)]
    failed = [f"- {_plain(sentence)}" for sentence in failures(rows)]
    if failed:
        blocks += ["Not measured:", "\n".join(failed)]
    return "\n\n".join(blocks) + "\n"


def _provenance(rows: Sequence[Row], environment: dict[str, Any]) -> str:
    settings = environment.get("settings", {})
    spreads = [row.ratio_spread for row in rows if row.ratio_spread is not None]
    parts = [
        f"{environment.get('device')}, torch {environment.get('torch')}",
        _when(environment),
        f"{settings.get('rounds')} rounds",
    ]
    if spreads:
        parts.append(f"half of the ratios spread (IQR) by less than {median(spreads):.3f}")
    # Networks that a later change does not touch may keep their rows, or some of them ("which");
    # the record says so by hand.
    shown = {row.model for row in rows}
    for earlier in environment.get("earlier", []):
        names = [network_title(model) for model in earlier["models"] if model in shown]
        if names:
            which = f" {earlier['which']}" if "which" in earlier else ""
            parts.append(f"{', '.join(names)}{which}: {_when(earlier)}")
    return "; ".join(parts) + "."


def _when(record: dict[str, Any]) -> str:
    commit = record.get("commit")
    return f"{str(record.get('date'))[:10]}" + (f", commit {commit[:7]}" if commit else "")


def _times(rows: Sequence[Row]) -> str:
    others = _columns(rows)
    titles = ["network", "format", "mode", "SGD, ms", *map(method_title, others)]
    lines = []
    for case in by_case(rows):
        row, of = case[0], {row.optimizer: row for row in case}
        sgd = of.get(REFERENCE)
        name = [network_title(row.model), row.dtype, row.mode]
        entries = [_time(of.get(other)) for other in others]
        lines.append([*name, three_digits(sgd.ms) if sgd else NONE, *entries])
    return _table(titles, lines, texts=3)


def _time(row: Row | None) -> str:
    if row is None:
        return NONE
    if row.error:
        return "not installed" if row.error.startswith("not installed") else "failed"
    floor = f" ({ratio(row.floor_ratio)})" if _is_ours(row.optimizer) else ""
    return ratio(row.ratio_to_sgd) + floor


def _columns(rows: Sequence[Row]) -> list[str]:
    """All optimizers but SGD, ours first: a narrow page shows few without scrolling."""
    others = [name for name in methods_of(rows) if name != REFERENCE]
    return sorted(others, key=lambda name: not _is_ours(name))


def _is_ours(optimizer: str) -> bool:
    method = METHODS.get(optimizer)
    return method is not None and method.statistics is not None


def _peaks(rows: Sequence[Row]) -> str:
    eager = [row for row in rows if row.mode == "eager"]
    return _by_network(eager, lambda row: ratio(row.peak_ratio_to_sgd), formats=True)


def _states(rows: Sequence[Row]) -> str:
    return _by_network(rows, lambda row: three_digits(row.state_per_parameter))


def _by_network(rows: Sequence[Row], entry: Callable[[Row], str], *, formats: bool = False) -> str:
    """A line per network (and number format), with the first row of each optimizer in it.

    One that differs from another only in what the host does keeps what that one keeps.
    """
    alike = [name for name, method in METHODS.items() if method.eager_only]
    others = [name for name in _columns(rows) if name not in alike]
    sizes = ["parameters", "format"] if formats else ["parameters", "batch"]
    titles = ["network", *sizes, *map(method_title, others)]
    lines = []
    for group in by_case(rows) if formats else by_model(rows):
        row = group[0]
        of = {row.optimizer: row for row in reversed(group) if row.state_bytes is not None}
        size = row.dtype if formats else f"{row.batch_size}"
        name = [network_title(row.model), f"{row.parameters:,}", size]
        lines.append([*name, *(entry(of[o]) if o in of else NONE for o in others)])
    return _table(titles, lines, texts=3)


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]], *, texts: int) -> str:
    """The first columns to the left, the rest to the right."""
    rule = ["---"] * texts + ["---:"] * (len(titles) - texts)
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, rule, *lines])


def _plain(text: str) -> str:
    """Keep messages from being read as Markdown or HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("$", "\\$")
