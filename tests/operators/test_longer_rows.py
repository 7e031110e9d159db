"""T(g) in rows that are longer than those of g: the same numbers, for a product that is faster.

As in test_kernels.py, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import needs_triton, run_checks

from virtualgrad import SVGD
from virtualgrad.operators import kernels
from virtualgrad.operators.channels import Channels, pitch_of
from virtualgrad.operators.kernels import Fused, Update, prepare
from virtualgrad.operators.tiles import Tile

UPDATE = Update(rho=0.9, weight=0.1 * 7, scale=0.5, eps=1e-3)
KNOWN = Update(rho=1, weight=0, scale=0.5, eps=1e-3)  # the r of before
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-6.9}  # on a GPU; both are rounded, by a unit

Case = tuple[tuple[int, ...], bool, Tile | None]
"""Shape of g, whether its samples lie apart, and the tile."""

PADDED: list[Case] = [
    ((6, 5, 9), False, Tile(8, 32, 1, True)),
    ((6, 5, 9), True, Tile(4, 16, 1, False)),
    ((6, 2, 3, 11), False, Tile(4, 16, 1, False)),
]


def compare_with_rows_as_they_are(
    device: str, case: Case, update: Update, dtype: torch.dtype
) -> None:
    """Rows of another length: the same numbers, and nothing is written behind them."""
    shape, is_apart, tile = case
    g = torch.randn(shape[0], 1 + is_apart, *shape[1:], device=device).to(dtype)[:, -1]
    r = torch.rand_like(g[0], dtype=torch.float32)
    if tile is None:
        prepared = prepare(g, r, (0,), known=update.is_known)
        assert prepared is not None
        tile = prepared.tile
    channels, pitch = shape[-1], shape[-1] + 5
    expected = Fused(g, 0, tile)(g, r, None, update)
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        found = Fused(g, 0, tile, None, pitch)(g, r, None, update)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.padded is not None
    assert found.padded.shape == (*shape[:-1], pitch)
    assert found.product.data_ptr() == found.padded.data_ptr()
    assert found.padded[..., channels:].isnan().all()
    # On a GPU they are two kernels, of which a compiler may order the sums in two ways.
    exact = (0.0, 0.0) if device == "cpu" else (ROUNDING[dtype], 1e-6)
    for one, other, rtol in zip(found[:2], expected[:2], exact, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-7 if rtol else 0)


@pytest.mark.parametrize("update", [KNOWN, UPDATE], ids=str)
@pytest.mark.parametrize("case", PADDED, ids=str)
def check_rows_of_another_length(case, update):
    compare_with_rows_as_they_are("cpu", case, update, torch.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("switches", [{}, {"stale": True}, {"per_sample": False, "stale": True}])
def check_a_layer_with_longer_rows(switches, bias, monkeypatch):
    monkeypatch.setattr("virtualgrad.operators.channels.MANY", 1)

    def gradients(pitches):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 9, bias=bias)  # 36 bytes
        optimizer = SVGD(layer, 0.1, scale=0.5, eps=1e-3, **switches)
        made = []
        with monkeypatch.context() as patch:
            find = kernels._pitch if pitches else lambda *_: None
            patch.setattr(kernels, "_pitch", lambda *given: made.append(find(*given)) or made[-1])
            for _ in range(2):
                layer(torch.randn(4, 5, 3)).square().mean().backward()
                optimizer.step()
        assert made == [12 if pitches else None]
        return [p.grad for p in layer.parameters()]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other)


def test_how_long_rows_are_to_be() -> None:
    assert [pitch_of(50257, size) for size in (2, 4)] == [50264, 50260]
    assert pitch_of(50257, 8) == 50258
    assert pitch_of(768, 2) == 768
    assert pitch_of(1001, 4) == 1004
    assert pitch_of(10, 2) == 10  # nothing to gain


def test_only_rows_that_a_layer_can_use_are_longer() -> None:
    g, wants = torch.empty(4, 3, 1001), Channels(2, may_pad=True)
    assert kernels._pitch(g, 0, wants) == 1004
    assert kernels._pitch(g, 0, None) is None
    assert kernels._pitch(g, 0, Channels(2)) is None
    assert kernels._pitch(g, 0, Channels(1, may_pad=True)) is None
    assert kernels._pitch(g[..., :1000], 0, wants) is None
    assert kernels._pitch(torch.empty(4, 1001, 3).mT, 0, wants) is None


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", [KNOWN, UPDATE], ids=str)
@pytest.mark.parametrize("case", [*PADDED, ((8, 300, 1001), False, None)], ids=str)
def test_rows_of_another_length_on_a_gpu(case: Case, update: Update, dtype: torch.dtype) -> None:
    compare_with_rows_as_they_are("cuda", case, update, dtype)
