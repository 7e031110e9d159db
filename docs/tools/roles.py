"""Docstrings as mkdocstrings wants them: a Sphinx role becomes plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`~?\.?([^`]+)`")


class Roles(griffe.Extension):
    """Turns ``:class:`virtualgrad.SVGD` `` into code, before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was just loaded."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
