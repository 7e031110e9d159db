"""Kernels that C++ launches do what they do when Triton launches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import ON_A_GPU
from torch import Tensor

from virtualgrad import native
from virtualgrad.operators.kernels import Update, prepare
from virtualgrad.operators.native_launches import native_kernel

pytestmark = pytest.mark.usefixtures("in_cpp")


class Compiled:
    """As much of a compiled kernel as is looked at."""

    function = 0

    def __init__(self, *kinds: str, **wants: Any) -> None:
        self.src = SimpleNamespace(signature={str(at): kind for at, kind in enumerate(kinds)})
        self.metadata = SimpleNamespace(**{"num_ctas": 1, "num_warps": 4, "shared": 0, **wants})


@pytest.mark.parametrize(
    "compiled",
    [
        Compiled("*fp32", "fp64"),
        Compiled("*fp32", "tensordesc<fp32[4, 4]>"),
        Compiled("*fp32", global_scratch_size=8),
        Compiled("*fp32", launch_pdl=True),
        Compiled("*fp32", num_ctas=2),
        SimpleNamespace(function=0),
    ],
)
def test_what_triton_has_to_launch(compiled: Any) -> None:
    assert native_kernel(compiled, (1, 1, 1)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_nothing_is_launched() -> None:
    assert native_kernel(Compiled("*fp32", "i32", "constexpr"), (1, 1, 1)) is None


def transformed(g: Tensor, r: Tensor, known: bool) -> list[Tensor]:
    """T(g) and the new norm, twice: the second launch goes by what the first has left."""
    update = Update(1.0, 0.0, 0.5, 1e-3) if known else Update(0.9, 0.1 / len(g), 0.5, 1e-3)
    fused = prepare(g, r, (0,), known=known)
    assert fused is not None
    norm, found = None, []
    for _ in range(3):
        made = fused(g, r, norm, update)
        norm = made.norm
        found += [made.product, made.norm]
    return found


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 640), (32, 16, 12, 12), (300, 4096)])
@pytest.mark.parametrize("place", [pytest.param("cuda", marks=ON_A_GPU)])
def test_kernels(
    place: str, shape: tuple[int, ...], dtype: torch.dtype, known: bool, monkeypatch: Any
) -> None:
    torch.manual_seed(0)
    g, r = torch.randn(shape, device=place).to(dtype), torch.rand(shape[1:], device=place)
    native.use(False)
    try:
        theirs = transformed(g, r, known)
    finally:
        native.use(True)
    launched = []

    def noted(compiled: Any, grid: Any) -> Any:
        launched.append(native_kernel(compiled, grid))
        return launched[-1]

    monkeypatch.setattr("virtualgrad.operators.launches.native_kernel", noted)
    ours = transformed(g, r, known)
    assert launched and None not in launched  # by C++ indeed
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    other_stream = torch.cuda.Stream()
    with torch.cuda.stream(other_stream):
        again = transformed(g, r, known)
    other_stream.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(again, theirs, strict=True))
