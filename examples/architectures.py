"""Which parameters of real architectures do virtual gradients reach? Writes the published table.

    python examples/architectures.py        # results/architectures.json, docs/architectures.md

Every model is made from its configuration with random weights; nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo import ARCHITECTURES, Architecture

from virtualgrad import explain

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"

HEAD = """\
# What virtual gradients reach in real architectures

Made by `python examples/architectures.py` with torch {torch} and transformers {transformers}; do
not edit by hand. Models are tiny, with random weights; *share* counts parameter elements that at
least one linear site covers, so that T acts on them. The rest trains by its plain gradient, as the
paper says, or is frozen. *Share there* is the share at the default size of the class: sizes are
counted there, what is covered is taken by name from the tiny model.
`tests/promises/test_architectures.py` checks each row.

| architecture | class | sites | r | parameters | share | default size | share there |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def measure(architecture: Architecture) -> dict[str, Any]:
    """What ``explain`` finds in one architecture."""
    inputs, _ = architecture.batch()
    model = architecture.model()
    found = explain(model, **inputs)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    large = architecture.default_sizes()
    # Only what was seen here counts as covered there.
    covered = {without_numbers(name) for name in sizes if name not in found.uncovered}
    return {
        "class": architecture.model_class,
        "sites": len(found.transformed),
        "r": found.state_elements,
        "parameters": found.parameter_elements,
        "covered": sum(size for name, size in sizes.items() if name not in found.uncovered),
        "default_parameters": sum(large.values()),
        "default_covered": sum(
            size for name, size in large.items() if without_numbers(name) in covered
        ),
        "uncovered": found.uncovered,
    }


def without_numbers(name: str) -> str:
    """``layers.3.A_log`` -> ``layers.*.A_log``: the same parameter of every layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def share(covered: int, parameters: int) -> str:
    """Per cent, rounded down: 100.0 is said of all parameters only."""
    return f"{int(1000 * covered / parameters) / 10:.1f} %"


def page(record: dict[str, Any]) -> str:
    """The table, and what is not covered and why."""
    lines = []
    reasons = []
    for name, row in record["architectures"].items():
        cells = [
            name,
            f"`{row['class']}`",
            f"{row['sites']:,}",
            f"{row['r']:,}",
            f"{row['parameters']:,}",
            share(row["covered"], row["parameters"]),
            f"{row['default_parameters'] / 1e6:,.0f} M",
            share(row["default_covered"], row["default_parameters"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        why = {without_numbers(key): reason for key, reason in row["uncovered"].items()}
        reasons += [f"| {name} | `{key}` | {reason} |" for key, reason in why.items()]
    head = HEAD.format(**record["versions"])
    tail = "\n## Not covered, and why\n\n| architecture | parameter | why |\n| --- | --- | --- |\n"
    return head + "\n".join(lines) + "\n" + tail + "\n".join(reasons) + "\n"


def main() -> None:
    """Measure every architecture, and write the record and the page made from it."""
    versions = {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    rows = {name: measure(architecture) for name, architecture in ARCHITECTURES.items()}
    record = {"versions": versions, "architectures": rows}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")
    print(page(record))


if __name__ == "__main__":
    main()
