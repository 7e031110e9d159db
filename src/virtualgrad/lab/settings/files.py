"""What was found, in a file beside the records; and the best settings of a sweep's summary."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtualgrad.lab.recipes import Recipe, Tuned
from virtualgrad.lab.record import RecordError, write_safely
from virtualgrad.lab.settings.ways import SWEPT, WAYS, Found

ENDING = "-settings.json"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Kept:
    """What was found for one recipe.

    Attributes:
        recipe: its name.
        title: what it is called in tables.
        found: settings by way.
        columns: way -> name of the runs with its settings; ways that agree share their runs.
        diverged: columns whose training left the finite numbers.
        sweep: number of trials and seeds of the sweep, if there is one.
    """

    recipe: str
    title: str
    found: tuple[Found, ...]
    columns: Mapping[str, str]
    diverged: tuple[str, ...] = ()
    sweep: Mapping[str, Any] | None = None

    def still_diverged(
        self, settings: Mapping[str, Tuned], trained: Collection[str]
    ) -> tuple[str, ...]:
        """Columns that blew up, have the same settings now, and are not trained again."""
        before = {each.way: each.tuned for each in self.found}
        return tuple(
            name
            for name in self.diverged
            if name not in trained
            and name in settings
            and _settings(before[name]) == _settings(settings[name])
        )

    def save(self, folder: Path) -> None:
        """Write it; an older file is replaced as a whole."""
        plain = {
            "recipe": self.recipe,
            "title": self.title,
            "sweep": self.sweep,
            "diverged": list(self.diverged),
            "ways": {
                each.way: {
                    "column": self.columns[each.way],
                    "lr": list(each.tuned.lr),
                    **each.tuned.options,
                    **each.details,
                }
                for each in self.found
            },
        }
        write_safely(folder / f"{self.recipe}{ENDING}", json.dumps(plain, indent=1) + "\n")


def columns_of(found: Sequence[Found]) -> dict[str, str]:
    """Way -> the first way with the same settings, under whose name it is trained."""
    columns: dict[str, str] = {}
    for each in found:
        same = (o.way for o in found if _settings(o.tuned) == _settings(each.tuned))
        columns[each.way] = next(same)
    return columns


def _settings(tuned: Tuned) -> tuple[Any, ...]:
    return tuned.lr, tuned.options["scale"]


def load_kept(folder: Path) -> list[Kept]:
    """What was found for every recipe of a folder.

    Raises:
        RecordError: There is none, or a file is damaged.
    """
    paths = sorted(folder.glob(f"*{ENDING}"))
    if not paths:
        raise RecordError.of(
            given=f"the folder {folder.name!r} without files such as mlp{ENDING}",
            allowed="a folder that `virtualgrad suggest` has written to",
            todo="run `virtualgrad suggest RECIPE` with --out set to it first",
        )
    return [_load(path) for path in paths]


def load_earlier(folder: Path, recipe: str) -> Kept | None:
    """What an earlier call has found for a recipe, if there was one."""
    path = folder / f"{recipe}{ENDING}"
    return _load(path) if path.exists() else None


def _load(path: Path) -> Kept:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        ways = {way: plain["ways"][way] for way in WAYS if way in plain["ways"]}
        found = tuple(
            Found(way, Tuned("svgd", tuple(each["lr"]), {"scale": each["scale"]}), {})
            for way, each in ways.items()
        )
        columns = {way: each["column"] for way, each in ways.items()}
        diverged, sweep = tuple(plain["diverged"]), plain["sweep"]
        return Kept(plain["recipe"], plain["title"], found, columns, diverged, sweep)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError.of(
            given=f"{path.name}, which cannot be read ({type(error).__name__}: {error})",
            allowed="a file that `virtualgrad suggest` has written",
            todo="delete it, and run the command again",
        ) from error


def best_of_sweep(path: Path, recipe: Recipe) -> tuple[Found, dict[str, Any]]:
    """SVGD's best settings in the summary of a sweep, and what is to be said of that sweep.

    Args:
        path: the folder that `virtualgrad sweep` wrote, or its summary.json.
        recipe: what was trained.

    Raises:
        RecordError: There is no summary, or it is of another recipe.
    """
    file = path / SUMMARY if path.is_dir() else path
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        best = summary["optimizers"]["svgd"]["best"]
        lr, scale = tuple(map(float, best["lr"])), float(f"{best['settings']['scale']:.4g}")
        about = {
            "trials": len(summary["optimizers"]["svgd"]["trials"]),
            "seeds": summary["seeds"],
            "steps": summary["steps"],
            "amp": summary["amp"],
            "errors": best["errors"],
        }
        of = summary["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError.of(
            given=f"--sweep {path.name}, which has no best settings of SVGD ({error!r})",
            allowed="a folder that `virtualgrad sweep RECIPE` has written, or its summary.json",
            todo="run that first, or leave out --sweep",
        ) from error
    if of != recipe.name or len(lr) != len(recipe.milestones) + 1:
        raise RecordError.of(
            given=f"--sweep {path.name}, a sweep of {of!r}",
            allowed=f"a sweep of {recipe.name!r}",
            todo="name the folder of that one",
        )
    return Found(SWEPT, Tuned("svgd", lr, {"scale": scale}), {}), about
