"""Where a built library lies: one for each torch and Python, and for the newest source alone."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "module.cpp"
MODULE = "virtualgrad_native"


def library() -> Path:
    """The file of the library; its name changes with all that it is built from."""
    names = ("module.cpp", "nodes.h", "layers.h", "norms.h", "launches.h", "building.py")
    source = _hashed((FOLDER / name).read_bytes() for name in names)
    return _folder() / f"{_beginning()}{source}.so"


def outdated() -> list[Path]:
    """Libraries for this torch that were built from other sources."""
    return [path for path in _folder().glob(f"{_beginning()}*.so") if path != library()]


def _folder() -> Path:
    """Beside what torch caches itself: under ``TORCH_HOME``, or ``~/.cache/torch``."""
    return Path(torch.hub._get_torch_home()) / "virtualgrad"


def _beginning() -> str:
    """What the names of all libraries for this torch begin with."""
    parts = (torch.__version__, torch.__file__, sysconfig.get_config_var("SOABI"))
    return f"{MODULE}-{_hashed(str(part).encode() for part in parts)}-"


def _hashed(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]
