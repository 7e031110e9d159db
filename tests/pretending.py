"""Our side of a pass, told that a compiler traces it, as plain Python."""

from __future__ import annotations

import sys

import pytest
import torch


def pretend_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``is_compiling()`` be true wherever the library asks, which has it by its name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("virtualgrad") and hasattr(module, "is_compiling"):
            monkeypatch.setattr(module, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
