"""Progress on the terminal; away from a terminal nothing is drawn, and log lines remain."""

from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["DownloadBar", "console", "spinner"]

console = Console(stderr=True)


class DownloadBar:
    """A download's bar, with the four members that pooch asks of one, drawn by rich.

    Args:
        name: What is being downloaded.
        enabled: False draws nothing, as does a standard error that is no terminal.
    """

    def __init__(self, name: str, *, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        """The bytes to come; None until the server has said."""
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: int) -> None:
        self._progress.update(self._task, total=size or None)

    def update(self, size: int) -> None:
        """Add the bytes that just came."""
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        """Go back to zero; pooch does so before it fills the bar at the end."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def spinner(text: str, *, enabled: bool) -> AbstractContextManager[object]:
    """Show that something of unknown length is under way."""
    return console.status(text) if enabled and console.is_terminal else nullcontext()
