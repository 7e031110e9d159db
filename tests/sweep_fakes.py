"""Searches whose errors are a formula, so that what comes of them is known beforehand."""

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from virtualgrad.lab.sweep.search import DivergedError, End, Search, Trial
from virtualgrad.lab.sweep.spaces import Range
from virtualgrad.lab.sweep.storage import Store
from virtualgrad.lab.sweep.studies import open_study

LR = Range(1e-4, 1)
BEST_LR, BEST_ERROR, SLOPE = 1e-2, 2.0, 3.0
LET_GO = "let-go"


def error_at(settings):
    """2 % at lr = 0.01 (and scale = 0.1), 3 points more for each decade away from there."""
    away = abs(math.log10(settings["lr"] / BEST_LR))
    away += abs(math.log10(settings.get("scale", 0.1) / 0.1))
    return BEST_ERROR + SLOPE * away


def trial(number, lr, error=None, end=End.COMPLETE, **settings):
    """A finished trial; its error is that of the formula unless it is given."""
    settings = {"lr": lr, **settings}
    errors = (error_at(settings),) if error is None else error
    return Trial(number, settings, end, errors if isinstance(errors, tuple) else (errors,))


@dataclass(frozen=True)
class Fake:
    """An objective: the formula, with two seeds, 0.1 either side of it.

    It leaves a file for each beginning and each end of a trial, named by process and setting.
    Behind the first ``free`` ends, trials under way are held until ``let_go``: a worker that a
    slow machine starts late still finds work, and a test has the time it needs to look.
    """

    folder: Path
    free: float = math.inf
    diverges_above: float = math.inf
    curve: tuple[float, ...] = (1.0,)  # step by step, as factors of the last error
    hook: object = field(default=None)

    def __call__(self):
        return self.make

    def make(self, settings, on_evaluation, on_progress):
        self._note("begin", settings)
        if self.hook is not None:
            self.hook(settings)
        if settings["lr"] > self.diverges_above:
            raise DivergedError("too large")
        error = error_at(settings)
        on_progress()
        while self._is_held():
            time.sleep(0.01)
            on_progress()
        for step, factor in enumerate(self.curve):
            on_evaluation(step, error * factor)
        self._note("end", settings)
        return (error - 0.1, error + 0.1)

    def _is_held(self):
        ended = len(notes(self.folder, "end"))
        return ended >= self.free and not (self.folder / LET_GO).exists()

    def _note(self, what, settings):
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{what}-{os.getpid()}-{settings['lr']:.17g}-{time.monotonic_ns()}"
        (self.folder / name).touch()


def let_go(folder):
    """End the hold of the searches whose notes lie in the folder."""
    (folder / LET_GO).touch()


def notes(folder, what):
    """(process, learning rate) of each beginning or end."""
    names = (path.name.split("-", 3) for path in sorted(folder.glob(f"{what}-*")))
    return [(int(name[1]), _rate(name)) for name in names]


def _rate(name):
    return float("-".join(name[2:]).rsplit("-", 1)[0])


def a_search(folder, *, trials=6, name="fake", ranges=None, identity=None, **how):
    return Search(
        name=name,
        title=f"Fake {name}",
        ranges=ranges or {"lr": LR},
        identity=identity or {"recipe": "fake"},
        make=Fake(folder, **how),
        trials=trials,
    )


def sqlite(folder, **how):
    return Store(f"sqlite:///{folder / 'sweep.db'}", **how)


def all_trials(search, store):
    with store.opened() as storage:
        return open_study(search, store, storage).get_trials()


def rates(trials):
    return [trial.settings["lr"] for trial in trials]


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
    return found
