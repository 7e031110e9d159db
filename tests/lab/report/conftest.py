"""Records whose means and deviations can be worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from virtualgrad.lab.readings import with_readings
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.record import Curve, Record

Make = Callable[..., Record]

DATA = {
    "mnist": {"name": "MNIST", "source": "the four original idx files, MD5 checked"},
    "cifar10": {"name": "CIFAR-10", "source": "the six official binary files, SHA-1 checked"},
}
DIGITS = {"name": "digits (embedded)", "source": "UCI optical recognition of digits; not MNIST"}


def make_record(
    recipe: str = "mlp",
    optimizer: str = "svgd",
    seed: int = 0,
    *,
    lowest: float = 1.6,
    last: float | None = None,
    **changes: Any,
) -> Record:
    """A finished run whose error falls in ten evaluations to `lowest`, and ends at `last`."""
    plan = RECIPES[recipe]
    tuned = {**plan.optimizers, **with_readings(plan).optimizers}[optimizer]
    options = {key: getattr(value, "__name__", value) for key, value in tuned.options.items()}
    steps = [plan.steps * (part + 1) // 10 for part in range(10)]
    errors = [lowest + 0.5 * (9 - part) for part in range(10)]
    errors[-2:] = [lowest, lowest if last is None else last]
    losses = [error / 30 for error in errors]
    record = Record(
        recipe,
        optimizer,
        seed,
        settings={
            "batch_size": plan.batch_size,
            "steps": plan.steps,
            "milestones": list(plan.milestones),
            "lr": list(tuned.lr),
            **options,
            "amp": False,
        },
        environment={"torch": "2.13.0", "device": "NVIDIA H200", "date": f"2026-01-0{seed + 1}"},
        data=dict(DATA[plan.data]),
        curve=Curve(steps, losses, list(losses), errors),
        ms_per_step=0.25,
        peak_memory_bytes=2**28,
        state_bytes=1536,
        finished=True,
    )
    return replace(record, **changes)


@pytest.fixture
def make() -> Make:
    return make_record


@pytest.fixture
def digits() -> dict[str, str]:
    return dict(DIGITS)


@pytest.fixture(scope="session")
def paper_runs() -> list[Record]:
    """All of the paper, two seeds each: its errors -0.1 and +0.1. Shared: do not change."""
    return [
        make_record(name, optimizer, seed, lowest=tuned.paper_error + (-0.1, 0.1)[seed])
        for name, recipe in RECIPES.items()
        for optimizer, tuned in recipe.optimizers.items()
        if tuned.paper_error is not None
        for seed in (0, 1)
    ]


@pytest.fixture
def saved() -> Callable[[list[Record], Path], Path]:
    """Save records into a folder."""

    def save(records: list[Record], folder: Path) -> Path:
        for record in records:
            record.save(folder)
        return folder

    return save
