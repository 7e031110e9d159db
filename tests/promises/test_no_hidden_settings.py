"""No promise rests on an environment variable or a hidden global: options are arguments."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import virtualgrad

LIBRARY = Path(virtualgrad.__file__).parent
# Triton's own, which it reads itself: whether its interpreter runs kernels on tensors of the CPU.
# And that by which makers of software are told their compiler, where a user asks for a build.
READ = {("operators/kernels.py", "TRITON_INTERPRET"), ("native/building.py", "CXX")}
TRAIN = """
import torch
from virtualgrad import SVGD
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(20, 2))
optimizer = SVGD(model, 0.05, scale=0.3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 3, 7)).square().mean().backward()
    optimizer.step()
print(*(value for p in model.parameters() for value in p.flatten().tolist()))
"""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """The library without the lab, which makes the experiments."""
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY).as_posix()
        if not name.startswith("lab/"):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def test_the_library_reads_no_environment_variable_of_its_own() -> None:
    found = set()
    for name, tree in sources():
        for node in ast.walk(tree):
            names = {getattr(node, field, None) for field in ("attr", "id", "name")}
            if names & {"environ", "environb", "getenv"}:
                calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args]
                read = [n.args[0] for n in calls if "environ" in ast.unparse(n.func)]
                found |= {(name, ast.literal_eval(argument)) for argument in read} or {(name, "?")}
    assert found == READ


def test_no_function_rebinds_a_global() -> None:
    rebinding = [
        f"{name}: {', '.join(node.names)}"
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert rebinding == []


def test_an_empty_environment_trains_alike() -> None:
    """Python alone, and with what a user's shell or a launcher may have set."""
    needed = {"PYTHONPATH": str(LIBRARY.parent), "OMP_NUM_THREADS": "1"}
    shell = os.environ | needed | {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "DEBUG": "1"}
    found = [
        subprocess.run(
            [sys.executable, "-c", TRAIN],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for environment in (needed, shell)
    ]
    assert len(found[0].split()) == 82
    assert found[0] == found[1]
