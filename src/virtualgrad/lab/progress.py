"""What one sees while runs are made: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console

from virtualgrad.lab.console import Bars, say
from virtualgrad.lab.run import Run

SECONDS_BETWEEN_LINES = 15
SECONDS_OF_SPEED = 30
"""Speed and time left go by the last so many seconds: other programs come and go."""


class Display(Bars):
    """Shows step, loss, error, speed and time left of a group of runs."""

    def __init__(self, title: str, steps: int, console: Console) -> None:
        super().__init__(console)
        self.title = title
        self.steps = steps
        self._last_line = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()  # (time, step) of the last half minute
        self._task = self.progress.add_task(title, total=steps, state="")

    def update(self, runs: Sequence[Run]) -> None:
        """Show where the runs are."""
        step, now = runs[0].step, time.monotonic()
        self._recent.append((now, step))
        while now - self._recent[1 % len(self._recent)][0] > SECONDS_OF_SPEED:
            self._recent.popleft()
        begin, first = self._recent[0]
        made, seconds = step - first, now - begin
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
