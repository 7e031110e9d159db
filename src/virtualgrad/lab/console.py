"""What all commands share: sentences, errors without a traceback, and the look of a bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from virtualgrad.errors import VirtualGradError

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def say(console: Console, sentence: str, style: str | None = None) -> None:
    """Print a sentence as it is: paths stay whole, brackets are no markup."""
    console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def errors_told(console: Console, when_stopped: str) -> Iterator[None]:
    """Turn what a user can do something about into a sentence and an exit status.

    Args:
        console: Of the command.
        when_stopped: What to say after Ctrl-C: what is kept, and how to go on.
    """
    try:
        yield
    except (VirtualGradError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # the system's own words
            text = f"{error.filename}: {error.strerror}. Choose another place, or make room there."
        say(Console(stderr=True), text, "red")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        say(console, when_stopped)
        raise typer.Exit(INTERRUPTED) from error


class Bars:
    """Bars on a terminal; elsewhere nothing is drawn, and subclasses print lines.

    Attributes:
        console: Where.
        progress: The bars; a task has a ``state``, a few words beside its bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:  # stopping what never started would print an empty line
            self.progress.stop()
