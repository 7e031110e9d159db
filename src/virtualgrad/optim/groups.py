"""Parameter groups whose hyperparameters of T can be read without touching the group.

torch.optim keeps hyperparameters in plain dicts, which users and schedulers write to. A compiled
pass that read such a dict would be compiled anew for every learning rate. So T's numbers are
mirrored: a write to the group reaches the mirror at once, and compiled passes read the mirror.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MIRRORED = ("scale", "rho", "eps")


class Mirror:
    """The numbers of T in one group, as attributes."""

    scale: Any
    rho: Any
    eps: Any


class Group(dict[str, Any]):
    """A parameter group that writes the numbers of T through to its mirror."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.mirror = Mirror()
        self._reflect(self)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._reflect({name: value})

    def update(self, *entries: Any, **named: Any) -> None:
        """As in a dict."""
        super().update(*entries, **named)
        self._reflect(self)

    def __ior__(self, entries: Any) -> Group:  # type: ignore[override,misc]
        self.update(entries)
        return self

    def setdefault(self, name: str, value: Any = None) -> Any:
        """As in a dict."""
        result = super().setdefault(name, value)
        self._reflect({name: result})
        return result

    def __reduce__(self) -> Any:
        """Copied and saved as the plain dict that it is to torch.optim."""
        return dict, (dict(self),)

    def _reflect(self, entries: Mapping[str, Any]) -> None:
        for name in MIRRORED:
            if name in entries:
                setattr(self.mirror, name, entries[name])
