"""Where a built library lies: one for each torch, Python and source."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("module.cpp")
MODULE = "virtualgrad_native"


def library() -> Path:
    """The file of the library; its name changes with all that it is built from."""
    hashed = hashlib.sha256(SOURCE.read_bytes())
    for header in sorted(SOURCE.parent.glob("*.h")):
        hashed.update(header.read_bytes())
    for part in (torch.__version__, torch.__file__, sysconfig.get_config_var("SOABI")):
        hashed.update(str(part).encode())
    beside_hub = Path(torch.hub.get_dir()).with_name("virtualgrad")  # where torch caches, too
    return beside_hub / f"{MODULE}-{hashed.hexdigest()[:16]}.so"
