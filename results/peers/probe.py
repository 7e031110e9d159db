"""What BackPACK, SINGD and Opacus do with the features of docs/compatibility.md: tried, not read.

    python -m venv peers && peers/bin/pip install torch==2.13.0 backpack-for-pytorch singd opacus
    peers/bin/python results/peers/probe.py          # all of it, into support.json
    peers/bin/python results/peers/probe.py opacus reused    # one probe, to see its error

Each probe runs in a process of its own. It returns a verdict (yes, partial, no, or a dash where the
question does not arise) and what was seen; an error is a no, with its message. The oracles are in
libraries.py; what a library says of itself is in its documentation, not here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {"backpack": "backpack-for-pytorch", "singd": "singd", "opacus": "opacus"}
FEATURES = {
    "compile": "torch.compile of the model",
    "autocast": "bfloat16 autocast",
    "grad_scaler": "GradScaler",
    "accumulation": "gradient accumulation",
    "clipping": "clip_grad_norm_",
    "closure": "step(closure)",
    "groups": "parameter groups and schedulers",
    "state_dict": "state_dict, to go on bit for bit",
    "checkpoint": "activation checkpointing, non-reentrant",
    "checkpoint_reentrant": "activation checkpointing, reentrant",
    "reused": "a layer used twice",
    "tied": "two layers that share a weight",
    "in_place": "in-place ReLU and += behind a layer",
    "raw": "a raw nn.Parameter",
    "convolutions": "convolutions, 1d to 3d, transposed, grouped",
    "norms": "batch, layer, group, instance, RMS norm",
    "embedding": "embeddings",
    "attention": "nn.MultiheadAttention",
    "rnn": "nn.LSTM",
    "frozen": "a frozen base with LoRA beside it",
    "ddp": "DistributedDataParallel, 2 ranks",
    "fsdp2": "FSDP2, 2 ranks",
    "typed": "type hints for users (py.typed)",
}


def run_one(library: str, feature: str) -> dict[str, str]:
    """A probe in a process of its own."""
    command = [sys.executable, __file__, library, feature]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return {"verdict": "no", "saw": "did not end within five minutes"}
    if "the probe itself is wrong" in done.stderr:
        raise SystemExit(f"{library} {feature}: {done.stderr.strip().splitlines()[-1]}")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"verdict": "no", "saw": (done.stderr.strip().splitlines() or ["died"])[-1][:200]}
    return json.loads(lines[-1])


def try_one(library: str, feature: str) -> dict[str, str]:
    """The same here."""
    from importlib import import_module  # noqa: PLC0415 - what they import is not always installed

    modules = [import_module(name) for name in ("steps", "models", "layers", "ranks")]
    probe = next(getattr(module, feature) for module in modules if hasattr(module, feature))
    try:
        verdict, saw = probe(library)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        said = lines[0].strip()
        said = said if len(said) <= 100 else f"{said[:100].rsplit(' ', 1)[0]} …"
        verdict, saw = "no", f"{type(error).__name__}: {said}"
    return {"verdict": verdict, "saw": saw}


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(try_one(*sys.argv[1:])))
        return
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": version("torch"),
        "python": sys.version.split()[0],
        "versions": {name: version(project) for name, project in LIBRARIES.items()},
        "features": [],
    }
    for feature, title in FEATURES.items():
        row = {"feature": feature, "title": title}
        row |= {library: run_one(library, feature) for library in LIBRARIES}
        print(title, *(f"{name}: {row[name]}" for name in LIBRARIES), sep="\n  ", flush=True)
        found["features"].append(row)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (HERE / "support.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
