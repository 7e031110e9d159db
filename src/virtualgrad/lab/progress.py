"""What one sees while runs are made: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console

from virtualgrad.lab.console import Bars, say
from virtualgrad.lab.run import Run

SECONDS_BETWEEN_LINES = 15


class Display(Bars):
    """Shows step, loss, error, speed and time left of a group of runs."""

    def __init__(self, title: str, steps: int, console: Console) -> None:
        super().__init__(console)
        self.title = title
        self.steps = steps
        self._begin = self._last_line = time.monotonic()
        self._first_step: int | None = None
        self._task = self.progress.add_task(title, total=steps, state="")

    def update(self, runs: Sequence[Run]) -> None:
        """Show where the runs are."""
        step, now = runs[0].step, time.monotonic()
        if self._first_step is None:
            self._first_step, self._begin = step, now
        made, seconds = step - self._first_step, now - self._begin
        state = _losses(runs)
        if made and seconds > 0:
            state.append(f"{made * len(runs) / seconds:,.0f} steps/s")
        self.progress.update(self._task, completed=step, state=", ".join(state))
        if not self.console.is_terminal and made and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = timedelta(seconds=round((self.steps - step) * seconds / made))
            parts = [f"step {step:,} of {self.steps:,}", *state, f"{left} left"]
            say(self.console, f"{self.title}: {', '.join(parts)}")


def _losses(runs: Sequence[Run]) -> list[str]:
    """Mean of the last evaluations, if there were any."""
    curves = [run.record.curve for run in runs if run.record.curve.step]
    if not curves:
        return []
    error = sum(curve.test_error[-1] for curve in curves) / len(curves)
    loss = sum(curve.train_loss[-1] for curve in curves) / len(curves)
    return [f"error {error:.2f} %", f"loss {loss:.3f}"]
