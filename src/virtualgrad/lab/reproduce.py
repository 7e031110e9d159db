"""Make the runs of the paper's tables: recipes in, records out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from virtualgrad.lab.batches import EvaluationSet, evaluation_set
from virtualgrad.lab.data import (
    DataUnavailableError,
    ImageData,
    UnknownDataError,
    load_cifar10,
    load_digits,
    load_mnist,
)
from virtualgrad.lab.engine import Engine
from virtualgrad.lab.interrupt import StopRequest
from virtualgrad.lab.progress import Display
from virtualgrad.lab.recipes import Recipe
from virtualgrad.lab.record import Record
from virtualgrad.lab.run import Run, Setup
from virtualgrad.lab.snapshot import drop_snapshot, resumed, save_snapshot

SECONDS_BETWEEN_SNAPSHOTS = 20

SMALL_BATCH = 32
"""Products of so few rows gain nothing by a second thread, and wait for it on a busy machine."""

DATA: dict[str, Callable[[], ImageData]] = {"mnist": load_mnist, "cifar10": load_cifar10}
"""Name of a recipe's data -> loads it."""


@dataclass(frozen=True)
class Job:
    """The runs to make: every optimizer with every seed.

    Attributes:
        recipe: what to train.
        optimizers: which of the recipe's optimizers.
        seeds: one run each.
        setup: device and number format.
        out: folder for the records.
        at_once: runs of one optimizer that are made side by side.
        resume: leave out finished runs, and go on with unfinished ones.
    """

    recipe: Recipe
    optimizers: Sequence[str]
    seeds: Sequence[int]
    setup: Setup
    out: Path
    at_once: int = 1
    resume: bool = False


def make_runs(job: Job, console: Console) -> list[Record]:
    """Train every optimizer of a job with every seed, and leave a record of each run.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; records and states are saved.
    """
    data, setup = load_data(job.recipe.data, console), job.setup
    if setup.device.type == "cpu" and job.recipe.batch_size <= SMALL_BATCH:
        torch.set_num_threads(1)
    held_out = evaluation_set(data, setup.device, job.recipe.test_batch, setup.channels_last)
    records = []
    for optimizer in job.optimizers:
        for first in range(0, len(job.seeds), job.at_once):
            runs = []
            for seed in job.seeds[first : first + job.at_once]:
                found = _prepare(
                    job, partial(Run, job.recipe, optimizer, seed, data, setup), console
                )
                if isinstance(found, Record):
                    records.append(found)
                else:
                    runs.append(found)
            runs.sort(key=_step)  # runs side by side make the same steps
            for _, group in groupby(runs, _step):
                records += _train(job, list(group), held_out, console)
    return records


def _step(run: Run) -> int:
    return run.step


def _prepare(job: Job, make: Callable[[], Run], console: Console) -> Run | Record:
    """A run at its first step or where it was, or the record of one finished before."""
    if not job.resume:
        run = make()
        drop_snapshot(run, job.out)  # of an older run
        return run
    run, found = resumed(make, job.out)
    record = finished_record(run, job.out)
    console.print(f"{_title([run])}: {'finished before' if record else found}", highlight=False)
    return record or run


def _train(
    job: Job, runs: Sequence[Run], held_out: EvaluationSet, console: Console
) -> list[Record]:
    """Train some runs side by side to their end."""
    last_snapshot = time.monotonic()

    def save() -> None:
        for run in runs:
            run.record.save(job.out)

    def on_progress() -> None:
        nonlocal last_snapshot
        display.update(runs)
        if stop.made or time.monotonic() - last_snapshot > SECONDS_BETWEEN_SNAPSHOTS:
            save()
            for run in runs:
                save_snapshot(run, job.out)
            last_snapshot = time.monotonic()
        if stop.made:
            raise KeyboardInterrupt

    title = _title(runs)
    with StopRequest() as stop, Display(title, job.recipe.steps, console) as display:
        Engine(runs).train(held_out, save, on_progress)
    for run in runs:
        run.finish()
        run.record.save(job.out)
        drop_snapshot(run, job.out)
    errors = ", ".join(f"{run.record.final_error:.2f}" for run in runs)
    console.print(
        f"{title}: last error {errors} %, {runs[0].record.ms_per_step or 0:.2f} ms a step",
        highlight=False,
    )
    return [run.record for run in runs]


def finished_record(run: Run, out: Path) -> Record | None:
    """The record of the same run, if it was made and finished before."""
    path = out / run.record.file_name
    if not path.exists():
        return None
    record, expected = Record.load(path), run.record
    same = (record.settings, record.data) == (expected.settings, expected.data)
    return record if record.finished and same else None


def load_data(name: str, console: Console) -> ImageData:
    """The data set of a recipe; without any network, digits in place of MNIST, and it is said."""
    if name not in DATA:
        raise UnknownDataError.of(
            given=f"the data {name!r} in a recipe",
            allowed=", ".join(DATA),
            todo="add yours to virtualgrad.lab.reproduce.DATA first",
        )
    try:
        return DATA[name]()
    except DataUnavailableError as error:
        if name != "mnist":
            raise
        console.print(str(error), style="yellow", markup=False, highlight=False)
        console.print(
            "No MNIST here: the embedded digits stand in for it. Their results are NOT comparable "
            "with the paper's.",
            style="bold yellow",
        )
        return as_mnist(load_digits())


def as_mnist(digits: ImageData) -> ImageData:
    """Enlarge the 8 x 8 digits to MNIST's 28 x 28, so that the same network takes them."""

    def enlarged(images: torch.Tensor) -> torch.Tensor:
        return F.interpolate(images.float(), size=(28, 28), mode="bilinear").to(torch.uint8)

    return replace(
        digits,
        train_images=enlarged(digits.train_images),
        test_images=enlarged(digits.test_images),
    )


def _title(runs: Sequence[Run]) -> str:
    seeds = [run.record.seed for run in runs]
    text = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    return f"{runs[0].recipe.title}, {runs[0].record.optimizer}, {text}"
