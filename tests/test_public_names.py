"""The names of the package are imported late, and are what they would be if it were early."""

import subprocess
import sys

import pytest

import virtualgrad


@pytest.mark.parametrize(
    "first",
    [
        "from virtualgrad import *",
        "from virtualgrad import explain",
        "import virtualgrad.explain",
        "from virtualgrad.explain.dot import dot_text",
        "from virtualgrad.optim import SVGD",
        "virtualgrad.optim.expect_state",
        "virtualgrad.errors.ModelError",
        "virtualgrad.native.built()",
    ],
)
def test_whatever_comes_first(first):
    code = f"""
import sys, types, virtualgrad
assert "torch" not in sys.modules
{first}
from virtualgrad import SVGD, Explanation, explain, operators, optim, suggest
assert virtualgrad.explain is explain and explain.__module__ == "virtualgrad.explain.explanation"
assert virtualgrad.SVGD is SVGD is sys.modules["virtualgrad.optim"].SVGD
assert isinstance(operators, types.ModuleType) and isinstance(optim, types.ModuleType)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_no_other():
    assert {*virtualgrad.__all__, "__version__", "optim"} <= set(dir(virtualgrad))
    assert all(getattr(virtualgrad, name) is not None for name in dir(virtualgrad))
    with pytest.raises(AttributeError, match="'virtualgrad' has no attribute 'SVDG'"):
        virtualgrad.SVDG  # noqa: B018
