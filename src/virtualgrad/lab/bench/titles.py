"""What networks and optimizers are called where people read, and numbers as they like them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import MODES, PRECISIONS
from virtualgrad.lab.bench.networks import NETWORKS, TINY
from virtualgrad.lab.bench.peers import PEER_NETWORKS, PEERS
from virtualgrad.lab.bench.rows import Row

NONE = "–"


def network_title(model: str) -> str:
    """The title of a network; the name where it has none."""
    network = (NETWORKS | PEER_NETWORKS).get(model.removesuffix(TINY))
    if network is None:
        return model
    return f"{network.title}, tiny" if model.endswith(TINY) else network.title


def method_title(optimizer: str) -> str:
    """The title of an optimizer; the name where it has none."""
    method = (METHODS | PEERS).get(optimizer)
    return optimizer if method is None else method.title


def of_peers(row: Row) -> bool:
    """Whether a row belongs to the comparison with other libraries."""
    return row.model.removesuffix(TINY) in PEER_NETWORKS


def methods_of(rows: Iterable[Row]) -> list[str]:
    """The optimizers of some rows, in the order of the tables."""
    there = {row.optimizer for row in rows}
    known = [name for name in METHODS | PEERS if name in there]
    return known + sorted(there.difference(known))


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that were measured in turns, together: by network, number format and mode."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.dtype, row.mode), []).append(row)
    # Networks as they come; calls at once finish in any order, so the rest as the options have it.
    models = list(dict.fromkeys(model for model, _, _ in groups))
    orders = (models, list(PRECISIONS), list(MODES))

    def place(case: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(
            order.index(name) if name in order else len(order)
            for order, name in zip(orders, case, strict=True)
        )

    return [groups[case] for case in sorted(groups, key=place)]


def by_model(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one network, together."""
    ordered = [row for group in by_case(rows) for row in group]
    return [list(group) for _, group in groupby(ordered, lambda row: row.model)]


def three_digits(value: float | None) -> str:
    """A positive number with three digits or all of its integer part, without an exponent.

    Example:
        >>> three_digits(0.012345), three_digits(1.5), three_digits(1234.5), three_digits(None)
        ('0.0123', '1.50', '1,234', '–')
    """
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def ratio(value: float | None) -> str:
    """A ratio with two digits behind the point."""
    return NONE if value is None else f"{value:.2f}"
