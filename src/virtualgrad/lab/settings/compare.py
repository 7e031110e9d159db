"""Train a recipe with the settings of every way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from virtualgrad.errors import NonFiniteError
from virtualgrad.lab.recipes import Recipe
from virtualgrad.lab.reproduce import Job, load_data, make_runs
from virtualgrad.lab.run import Setup
from virtualgrad.lab.settings.files import Kept, columns_of, load_earlier
from virtualgrad.lab.settings.ways import SWEPT, WAYS, Found, find_settings


@dataclass(frozen=True)
class Comparison:
    """What to train, and how.

    Attributes:
        recipe: the network, its data and the optimizers to start from.
        seeds: one run each, for every way.
        setup: device and number format.
        out: folder for the records.
        ways: which of :data:`virtualgrad.lab.settings.ways.WAYS` to train; settings are found by
            all of them.
        swept: settings of a sweep, if there is one, and what is to be said of it; those of an
            earlier call are kept.
        at_once: runs side by side.
        resume: leave out finished runs, and go on with unfinished ones.
    """

    recipe: Recipe
    seeds: Sequence[int]
    setup: Setup
    out: Path
    ways: Sequence[str] = tuple(WAYS)
    swept: tuple[Found, dict[str, Any]] | None = None
    at_once: int = 1
    resume: bool = False


def compare(job: Comparison, console: Console) -> Kept:
    """Find settings by every way, train with them, and keep what was found.

    Settings that blow up are noted as such, and the others go on.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; records and states are saved.
    """
    data = load_data(job.recipe.data, console)
    found = find_settings(job.recipe, data, job.setup)
    earlier = load_earlier(job.out, job.recipe.name)
    sweep: Mapping[str, Any] | None = None
    if job.swept is not None:
        found.append(job.swept[0])
        sweep = job.swept[1]
    elif earlier is not None and SWEPT in earlier.columns:
        found.append(earlier.found[-1])
        sweep = earlier.sweep
    columns = columns_of(found)
    settings = {each.way: each.tuned for each in found}
    names = dict.fromkeys(columns[way] for way in job.ways if way in columns)
    recipe = replace(job.recipe, optimizers={name: settings[name] for name in names})
    diverged = () if earlier is None else earlier.still_diverged(settings, names)
    kept = Kept(job.recipe.name, job.recipe.title, tuple(found), columns, diverged, sweep)
    kept.save(job.out)
    for column, tuned in recipe.optimizers.items():
        console.print(
            f"{column}: lr {', '.join(f'{rate:g}' for rate in tuned.lr)}; "
            f"scale {tuned.options['scale']:g}",
            highlight=False,
        )
        runs = Job(recipe, [column], job.seeds, job.setup, job.out, job.at_once, job.resume)
        try:
            make_runs(runs, console)
        except NonFiniteError as error:
            console.print(f"{column}: diverged ({error})", markup=False, highlight=False)
            kept = replace(kept, diverged=(*kept.diverged, column))
            kept.save(job.out)
            _forget(job, column)
    return kept


def _forget(job: Comparison, column: str) -> None:
    """Remove the records and states of runs that will never end."""
    for seed in job.seeds:
        record = job.out / f"{job.recipe.name}-{column}-seed{seed}.json"
        record.unlink(missing_ok=True)
        record.with_suffix(".pt").unlink(missing_ok=True)
