"""How a step is run, and in which number format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from virtualgrad.native import use


@dataclass(frozen=True)
class Mode:
    """How a step is run.

    Attributes:
        name: In options, records and tables.
        compiled: The model is compiled by `torch.compile(model, fullgraph=True)`: its forward and
            backward; the optimizer's step stays as it is.
        graphed: The whole step is captured in a CUDA graph and replayed, so that the time is the
            GPU's own and not the host's.
        native: Layers with a T are nodes of C++ (`python -m virtualgrad.native`), not of Python.
    """

    name: str
    compiled: bool = False
    graphed: bool = False
    native: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("eager"),
        Mode("native", native=True),
        Mode("graphed", graphed=True),
        Mode("compiled", compiled=True),
        Mode("compiled+graphed", compiled=True, graphed=True),
    )
}


@dataclass(frozen=True)
class Precision:
    """A number format.

    Attributes:
        name: In options, records and tables.
        tf32: Whether a GPU may round the factors of fp32 products to TF32.
        autocast: bfloat16 autocast of forward and loss.
    """

    name: str
    tf32: bool = True
    autocast: bool = False


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", tf32=False),
        Precision("tf32"),
        Precision("bf16", autocast=True),
    )
}


@contextmanager
def layers_in(mode: Mode) -> Iterator[None]:
    """Have layers that are run first while the block lasts as nodes of C++, or of Python."""
    use(mode.native)
    try:
        yield
    finally:
        use(True)


@contextmanager
def numbers_in(precision: Precision) -> Iterator[None]:
    """Switch TF32 on or off, and let cuDNN choose kernels by trial, while the block lasts."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = precision.tf32, precision.tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before
