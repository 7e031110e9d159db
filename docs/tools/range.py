"""Draw docs/images/range.png: a range test of the paper's MLP on MNIST, 150 steps a scale.

Run it as ``python docs/tools/range.py``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from rich.console import Console

from virtualgrad import range_test
from virtualgrad.lab.batches import Batches
from virtualgrad.lab.networks import MLP
from virtualgrad.lab.reproduce import load_data

STEPS = 150
IMAGE = Path(__file__).parents[1] / "images" / "range.png"


def main() -> None:
    """Run the test and save its picture."""
    matplotlib.use("Agg")
    batches = Batches(load_data("mnist", Console()), 32, 0, torch.device("cpu"), False)
    batches.seek(0)
    torch.manual_seed(0)
    result = range_test(
        MLP(), F.cross_entropy, (batches.next() for _ in range(STEPS)), steps=STEPS, lr_max=30
    )
    print(result)
    result.plot().figure.savefig(IMAGE, dpi=120)


if __name__ == "__main__":
    main()
