"""What one sees while the benchmark runs: a bar on a terminal, a line per case elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from virtualgrad.lab.bench.measure import Case
from virtualgrad.lab.bench.rows import Row
from virtualgrad.lab.console import Bars, say


class Display(Bars):
    """Counts timed blocks, and tells what came out of each case.

    Args:
        cases: All that will be measured.
        rounds: Timed blocks of each optimizer.
        console: Where to show it.
    """

    def __init__(self, cases: Sequence[Case], rounds: int, console: Console) -> None:
        super().__init__(console)
        self._rounds = rounds
        total = sum(case.blocks(rounds) for case in cases)
        self._task = self.progress.add_task("", total=total, state="")
        self._title, self._begin = "", 0.0
        self._done = 0

    def begin(self, case: Case) -> None:
        """A case begins."""
        self._title, self._begin = case.title, time.monotonic()
        self.progress.update(self._task, description=case.title)

    def block(self, optimizer: str) -> None:
        """A block of an optimizer begins."""
        self.progress.update(self._task, description=f"{self._title}: {optimizer}", advance=1)

    def end(self, case: Case, rows: Sequence[Row]) -> None:
        """A case is measured; blocks that failures have left out count as done."""
        self._done += case.blocks(self._rounds)
        self.progress.update(self._task, completed=self._done)
        ratios = [
            f"{row.optimizer} {row.ratio_to_sgd:.2f}"
            for row in rows
            if row.ratio_to_sgd is not None
        ]
        failed = [row.optimizer for row in rows if row.error]
        told = [f"x SGD: {', '.join(ratios)}"] if ratios else []
        told += [f"failed: {', '.join(failed)}"] if failed else []
        told.append(f"{time.monotonic() - self._begin:.1f} s")
        say(self.console, f"{case.title}: {'; '.join(told)}")
