"""Where data sets are kept."""

import os
from pathlib import Path

__all__ = ["DATA_VARIABLE", "data_folder"]

DATA_VARIABLE = "VIRTUALGRAD_DATA"


def data_folder() -> Path:
    """Return the folder that `VIRTUALGRAD_DATA` names, or else one in the user's cache.

    The latter is `$XDG_CACHE_HOME/virtualgrad`, or `~/.cache/virtualgrad`. Nothing is created here.
    """
    if named := os.environ.get(DATA_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "virtualgrad"
