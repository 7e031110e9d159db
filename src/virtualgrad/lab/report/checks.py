"""Records that a report must not use: damaged ones, and ones whose average would mean nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from virtualgrad.lab.record import Record, RecordError


def check(finished: Sequence[Record]) -> None:
    """Refuse finished runs that cannot be reported together.

    Args:
        finished: The records of all finished runs.

    Raises:
        RecordError: A curve is damaged, a run is there twice, or runs that would be averaged or
            compared in one table were not made alike. The text names the files.
    """
    for record in finished:
        _check_curve(record)
    _check_once(finished)
    _check_alike(finished, _cell, lambda record: record.settings)
    _check_alike(finished, _recipe, _conditions)


def _check_curve(record: Record) -> None:
    curve = record.curve
    lengths = {len(values) for values in vars(curve).values()}
    numbers = (*curve.step, *curve.test_error)
    if len(lengths) != 1 or not numbers or not all(map(_is_finite, numbers)):
        raise RecordError.of(
            given=f"{record.file_name}, finished but with a damaged learning curve",
            allowed="a step, two losses and a finite test error for every evaluation",
            todo="delete the file and repeat the run",
        )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_once(records: Sequence[Record]) -> None:
    seen: set[str] = set()
    for record in records:
        if record.file_name in seen:
            raise RecordError.of(
                given=f"two files that both record the run {record.file_name}",
                allowed="one record per recipe, optimizer and seed",
                todo="keep the one that counts and move the other to a folder of its own",
            )
        seen.add(record.file_name)


def _check_alike(
    records: Sequence[Record],
    group: Callable[[Record], Hashable],
    facts: Callable[[Record], dict[str, Any]],
) -> None:
    first_of: dict[Hashable, Record] = {}
    for record in records:
        first = first_of.setdefault(group(record), record)
        one, other = facts(first), facts(record)
        if one != other:
            differences = "; ".join(
                f"{key} is {one.get(key)!r} and {other.get(key)!r}"
                for key in sorted({*one, *other})
                if one.get(key) != other.get(key)
            )
            raise RecordError.of(
                given=f"{first.file_name} and {record.file_name}, which differ: {differences}",
                allowed="runs in one folder that may be averaged and compared",
                todo="move the runs of each kind to a folder of their own",
            )


def _recipe(record: Record) -> Hashable:
    return record.recipe


def _cell(record: Record) -> Hashable:
    return record.recipe, record.optimizer


def _conditions(record: Record) -> dict[str, Any]:
    """What must be the same for all optimizers of one table."""
    return {
        "data": record.data.get("name"),
        "amp": record.settings.get("amp"),
        "milestones": record.settings.get("milestones"),
        "last step": record.curve.step[-1],
        "evaluations": len(record.curve.step),
    }
