"""What one sees while trials are made: a live line per search on a terminal, plain lines elsewhere.

It reads the database, so the trials of other machines show too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import optuna
from optuna.trial import TrialState
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from virtualgrad.lab.sweep.search import End, Search
from virtualgrad.lab.sweep.sensitivity import best_of
from virtualgrad.lab.sweep.studies import finished_trials

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 15.0


class Display:
    """Shows finished and running trials and the lowest error of every search."""

    def __init__(self, pairs: Sequence[tuple[Search, optuna.Study]], console: Console) -> None:
        self.pairs = pairs
        self.console = console
        self._last_look = self._last_line = 0.0
        self._said: list[str] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._tasks: list[TaskID] = [
            self._progress.add_task(search.title, total=search.trials, state="")
            for search, _ in pairs
        ]

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:  # stopping what never started would print an empty line
            self._progress.stop()

    def tick(self) -> None:
        """Look again, if the last look is long enough ago."""
        now = time.monotonic()
        if now - self._last_look < SECONDS_BETWEEN_LOOKS:
            return
        self._last_look = now
        lines = []
        for task, (search, study) in zip(self._tasks, self.pairs, strict=True):
            done, state = _state(study)
            self._progress.update(task, completed=done, state=state)
            if done or state:
                lines.append(f"{search.title}: {done} of {search.trials} trials, {state}")
        if not self.console.is_terminal and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            for line in lines:
                if line not in self._said:  # searches that wait or are finished are told once
                    self.console.print(line, soft_wrap=True, highlight=False, markup=False)
            self._said = lines


def _state(study: optuna.Study) -> tuple[int, str]:
    """Trials that are finished, and in words what else there is to say."""
    trials = finished_trials(study)
    running = len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
    pruned = sum(trial.end is End.PRUNED for trial in trials)
    best = best_of(trials)
    parts = [
        f"best {best.spread.mean:.2f} %" if best else "",
        f"{running} running" if running else "",
        f"{pruned} pruned" if pruned else "",
    ]
    return len(trials), ", ".join(filter(None, parts))
