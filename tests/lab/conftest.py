"""What the tests of the lab share: a tiny data set, and a console to read."""

from io import StringIO

import pytest
from rich.console import Console
from tiny_lab import tiny_data

from virtualgrad.lab.reproduce import DATA


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(DATA, "tiny", tiny_data)


@pytest.fixture
def console():
    return Console(file=StringIO(), width=200)
