"""Ctrl-C as a request: training stops after a step, where its state can be kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """While active, the first Ctrl-C only sets :attr:`made`; a second one interrupts at once."""

    def __init__(self) -> None:
        self.made = False
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopRequest:
        if self._in_main_thread:  # Python handles signals nowhere else
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.made:
            raise KeyboardInterrupt
        self.made = True
