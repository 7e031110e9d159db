"""The built library, if there is one for this torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import warnings
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from virtualgrad.native.place import MODULE, library


@dataclass
class Choice:
    """Whether the library is used where there is one."""

    is_on: bool = True


_choice = Choice()


def use(on: bool) -> None:
    """Use the library, or do without it: for layers and kernels that are run first from now on."""
    _choice.is_on = on


def built() -> ModuleType | None:
    """The module of ``module.cpp``; None if it was not built, or is switched off.

    Asked once for each layer and kernel.
    """
    return _loaded() if _choice.is_on else None


@cache
def _loaded() -> ModuleType | None:
    try:
        path = library()
        if not path.is_file():
            return None
    except (OSError, ValueError):  # a home that may not be read, sources that were not shipped
        return None
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        warnings.warn(
            f"{path} cannot be loaded ({error}): layers run as nodes of Python, which are slower "
            "and otherwise the same. Build it anew with python -m virtualgrad.native, or remove it",
            stacklevel=2,
        )
        return None
    return module


def forget() -> None:
    """Look again when the layers are asked for next: another library was built."""
    _loaded.cache_clear()
