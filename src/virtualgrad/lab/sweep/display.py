"""What one sees while trials are made: a live line per search on a terminal, plain lines elsewhere.

It reads the database, so the trials of other machines show too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import optuna
from optuna.trial import TrialState
from rich.console import Console
from rich.progress import TaskID

from virtualgrad.lab.console import Bars, say
from virtualgrad.lab.sweep.search import End, Search
from virtualgrad.lab.sweep.sensitivity import best_of
from virtualgrad.lab.sweep.studies import finished_trials

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 15.0


class Display(Bars):
    """Shows finished and running trials and the lowest error of every search."""

    def __init__(self, pairs: Sequence[tuple[Search, optuna.Study]], console: Console) -> None:
        super().__init__(console)
        self.pairs = pairs
        self._last_look = self._last_line = 0.0
        self._said: list[str] = []
        self._tasks: list[TaskID] = [
            self.progress.add_task(search.title, total=search.trials, state="")
            for search, _ in pairs
        ]

    def tick(self) -> None:
        """Look again, if the last look is long enough ago."""
        now = time.monotonic()
        if now - self._last_look < SECONDS_BETWEEN_LOOKS:
            return
        self._last_look = now
        lines = []
        for task, (search, study) in zip(self._tasks, self.pairs, strict=True):
            done, state = _state(study)
            self.progress.update(task, completed=done, state=state)
            if done or state:
                lines.append(f"{search.title}: {done} of {search.trials} trials, {state}")
        if not self.console.is_terminal and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            for line in lines:
                if line not in self._said:  # searches that wait or are finished are told once
                    say(self.console, line)
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
