"""The tables of support: support.json beside this file, and what the tests hold of virtualgrad.

.venv/bin/python results/peers/table.py     # into docs/compatibility.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from virtualgrad.lab.report.readme import update_readme

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results/peers/support.json"
PLACE, PLACE_SHORT = "peers", "peers-short"
NAMES = {"backpack": "BackPACK", "singd": "SINGD", "opacus": "Opacus"}
VERDICTS = ("yes", "partial", "no", "–")

OURS = {
    "compile": ("yes", "tests/virtual/test_compiled.py"),
    "autocast": ("yes", "tests/promises/test_autocast.py"),
    "grad_scaler": ("yes", "tests/promises/test_grad_scaler.py"),
    "accumulation": ("yes", "tests/promises/test_ddp.py"),
    "clipping": ("yes", "tests/promises/test_clipping.py"),
    "closure": ("yes", "tests/optim/test_drop_in.py"),
    "groups": ("yes", "tests/promises/test_groups.py"),
    "state_dict": ("yes", "tests/optim/test_drop_in.py"),
    "checkpoint": ("yes", "tests/promises/test_checkpointing.py"),
    "checkpoint_reentrant": ("yes", "tests/promises/test_checkpointing.py"),
    "reused": ("yes", "tests/virtual/test_agreement.py"),
    "tied": ("yes", "tests/virtual/test_agreement.py"),
    "in_place": ("yes", "tests/virtual/test_attach.py"),
    "raw": ("yes", "tests/virtual/test_agreement.py"),
    "convolutions": ("yes", "tests/virtual/test_agreement.py"),
    "norms": ("yes", "tests/virtual/test_agreement.py"),
    "embedding": ("yes", "tests/virtual/test_agreement.py"),
    "attention": ("yes", "tests/virtual/test_agreement.py"),
    "rnn": ("partial", "tests/promises/test_sequences.py"),
    "frozen": ("yes", "tests/promises/test_peft.py"),
    "ddp": ("yes", "tests/promises/test_ddp.py"),
    "fsdp2": ("yes", "tests/promises/test_ddp.py"),
    "typed": ("yes", "src/virtualgrad/py.typed"),
}
"""Feature -> what holds here, and the test that holds it."""

NOTES = {
    "accumulation": "exact with stale=True (SVGD.released has it); else T goes by the r known yet",
    "rnn": "trains by its plain gradient; cells (LSTMCell and its like) are transformed",
}
"""What to know of our own."""

SHORT = {
    "torch.compile": ("compile",),
    "GradScaler": ("grad_scaler",),
    "gradient accumulation": ("accumulation",),
    "activation checkpointing": ("checkpoint", "checkpoint_reentrant"),
    "reused and tied layers": ("reused", "tied"),
    "in-place ops behind a layer": ("in_place",),
    "raw parameters": ("raw",),
    "attention; LSTM": ("attention", "rnn"),
    "convolutions, norms, embeddings": ("convolutions", "norms", "embedding"),
    "frozen base with LoRA": ("frozen",),
    "DDP": ("ddp",),
    "FSDP2": ("fsdp2",),
}
"""A line of the short table -> the features that it sums up; where they differ, it says partial."""


def load() -> dict[str, Any]:
    """What the probes have seen."""
    return dict(json.loads(RECORD.read_text(encoding="utf-8")))


def full_table(record: dict[str, Any]) -> str:
    """Every feature, with notes on all that is not a plain yes."""
    notes: list[str] = []
    lines = []
    for row in record["features"]:
        cells = [
            _cell(row[name]["verdict"], f"{NAMES[name]}: {row[name]['saw']}", notes)
            if row[name]["verdict"] in ("partial", "no")
            else row[name]["verdict"]
            for name in NAMES
        ]
        ours, own_note = OURS[row["feature"]][0], NOTES.get(row["feature"])
        cells.append(_cell(ours, f"virtualgrad: {own_note}", notes) if own_note else ours)
        lines.append([row["title"], *cells])
    listed = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{_provenance(record)}\n\n{_table(_titles(record), lines)}\n\n{listed}\n"


def short_table(record: dict[str, Any]) -> str:
    """The lines of :data:`SHORT`, without notes."""
    rows = {row["feature"]: row for row in record["features"]}
    lines = []
    for title, features in SHORT.items():
        by_column = [[rows[f][name]["verdict"] for f in features] for name in NAMES]
        by_column.append([OURS[f][0] for f in features])
        lines.append(
            [title, *(found[0] if len(set(found)) == 1 else "partial" for found in by_column)]
        )
    return _table(_titles(record), lines) + "\n"


def _provenance(record: dict[str, Any]) -> str:
    return (
        f"Tried on {record['date']} with torch {record['torch']} on a CPU, the newest release of "
        "each, in its default mode."
    )


def _titles(record: dict[str, Any]) -> list[str]:
    versions = record["versions"]
    return ["", *(f"{title} {versions[name]}" for name, title in NAMES.items()), "virtualgrad"]


def _cell(verdict: str, note: str, notes: list[str]) -> str:
    """A verdict with the number of its note; notes that say the same share one."""
    text = note.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
    if text not in notes:
        notes.append(text)
    return f"{verdict} ({notes.index(text) + 1})"


def _table(titles: list[str], lines: list[list[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    record = load()
    blocks = {PLACE_SHORT: short_table(record), PLACE: full_table(record)}
    update_readme(ROOT / "docs/compatibility.md", blocks)


if __name__ == "__main__":
    main()
