"""A torch function mode of a user's."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode


class Counting(TorchFunctionMode):
    """Writes down the torch functions that it sees, and calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
