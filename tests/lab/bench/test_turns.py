"""Calls that share a folder make their models side by side, and measure alone."""

import threading
from pathlib import Path

import pytest

from virtualgrad.lab.bench.rows import Results, Row, load_rows
from virtualgrad.lab.bench.turns import Turns

SOON = 30.0
"""Seconds after which a thread that should have gone on never will."""

NOT_YET = 0.2
"""Seconds in which a thread that must wait would have gone on."""


class Other:
    """Another call: it enters a turn in a thread of its own, and stays until it is told to go."""

    def __init__(self, turn) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._stay, args=(turn,), daemon=True)
        self._thread.start()

    def _stay(self, turn) -> None:
        with turn:
            self.inside.set()
            self.go.wait(SOON)

    def leave(self) -> None:
        self.go.set()
        self._thread.join(SOON)


def test_several_make_at_once(tmp_path: Path) -> None:
    first, second = Other(Turns(tmp_path).making()), Other(Turns(tmp_path).making())
    assert first.inside.wait(SOON) and second.inside.wait(SOON)
    first.leave()
    second.leave()


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("making", "measuring"),
        ("measuring", "making"),
        ("measuring", "measuring"),
        ("measuring", "choosing"),
        ("choosing", "measuring"),
        ("choosing", "choosing"),
    ],
)
def test_who_measures_or_chooses_is_alone(tmp_path: Path, earlier: str, later: str) -> None:
    first = Other(getattr(Turns(tmp_path), earlier)())
    assert first.inside.wait(SOON)
    second = Other(getattr(Turns(tmp_path), later)())
    assert not second.inside.wait(NOT_YET)
    first.leave()
    assert second.inside.wait(SOON)
    second.leave()


def test_one_may_choose_while_others_make(tmp_path: Path) -> None:
    maker, chooser = Other(Turns(tmp_path).making()), Other(Turns(tmp_path).choosing())
    assert maker.inside.wait(SOON) and chooser.inside.wait(SOON)
    later = Other(Turns(tmp_path).making())
    assert later.inside.wait(SOON)
    for other in (maker, chooser, later):
        other.leave()


def test_an_error_ends_the_turn(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Turns(tmp_path).measuring():
        raise ZeroDivisionError
    other = Other(Turns(tmp_path).measuring())
    assert other.inside.wait(SOON)
    other.leave()


def test_rows_of_other_calls_stay(tmp_path: Path) -> None:
    """Both calls found an empty folder; neither may write over what the other has measured."""
    first, second = Results(tmp_path, {}), Results(tmp_path, {})
    rows = [Row("mlp", "eager", "fp32", name, 32, 1, ms=1.0) for name in ("sgd", "adam", "svgd")]
    first.add(rows[:1])
    second.add(rows[1:2])
    first.add(rows[2:])
    assert {row.optimizer for row in load_rows(tmp_path)} == {"sgd", "adam", "svgd"}
