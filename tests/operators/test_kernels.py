"""The fused kernel against its oracle, and where it steps aside.

There is no GPU where these run as a rule: the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor

from virtualgrad import Site
from virtualgrad.operators import RMS, kernels, rms_fused
from virtualgrad.operators.channels import Channels, Total
from virtualgrad.operators.kernels import Fused, Update, fits, plain, prepare
from virtualgrad.operators.tiles import Summed, Tile, choose_tile, sums_of
from virtualgrad.sites import read_layout

CONTIGUOUS, CHANNELS_LAST, APART, TOGETHER = "contiguous", "channels last", "apart", "expanded"
UPDATE = Update(rho=0.9, weight=0.1 * 7, scale=0.5, eps=1e-3)
KNOWN = Update(rho=1, weight=0, scale=0.5, eps=1e-3)  # the r of before
# Half a unit in the last place where it rounds; of bfloat16 the interpreter cuts the tail off.
ROUNDING = {
    ("cpu", torch.float32): 1e-6,
    ("cpu", torch.bfloat16): 2**-7,
    ("cpu", torch.float16): 2**-10.9,
    ("cuda", torch.float32): 1e-6,
    ("cuda", torch.bfloat16): 2**-7.9,
    ("cuda", torch.float16): 2**-10.9,
}

Case = tuple[tuple[int, ...], str, Tile | None]
CASES: list[Case] = [
    ((128, 10), CONTIGUOUS, None),
    ((1, 33), CONTIGUOUS, None),
    ((1, 1), CONTIGUOUS, None),
    ((7, 3, 5), CONTIGUOUS, None),
    ((16, 300, 16), CONTIGUOUS, None),  # several programs
    ((5, 16, 6, 4), CHANNELS_LAST, None),
    ((9, 48), APART, None),
    ((6, 8, 3, 5), APART, None),
    ((3, 40), TOGETHER, None),
    ((33, 20), CONTIGUOUS, Tile(8, 16, 1, False)),  # rows in five parts, the last of one row
    ((32, 40), APART, Tile(16, 32, 2, False)),
    ((20, 8, 3, 3), CHANNELS_LAST, Tile(4, 16, 1, False)),
    ((3, 5), CONTIGUOUS, Tile(16, 16, 1, False)),  # fewer rows than one part
    ((2100, 20), CONTIGUOUS, Tile(256, 32, 8, False)),
    ((2000, 20), CONTIGUOUS, None),
]

Variant = tuple[torch.dtype, Update, bool]  # and whether there were earlier passes
VARIANTS: list[Variant] = [
    (torch.float32, KNOWN, False),
    (torch.float32, KNOWN, True),
    (torch.float32, UPDATE, False),
    (torch.float32, UPDATE, True),
    (torch.bfloat16, KNOWN, False),
    (torch.bfloat16, UPDATE, True),
    (torch.float16, UPDATE, False),
]


def gradient(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    torch.manual_seed(sum(shape))
    if layout == APART:
        return torch.randn(shape[0], 2, *shape[1:], device=device).to(dtype)[:, 1]
    if layout == TOGETHER:
        return torch.randn(1, *shape[1:], device=device).to(dtype).expand(shape)
    g = torch.randn(shape, device=device).to(dtype)
    return g.contiguous(memory_format=torch.channels_last) if layout == CHANNELS_LAST else g


def compare_with_oracle(
    device: str, case: Case, variant: Variant, total: Total | None = None
) -> None:
    (shape, layout, tile), (dtype, update, accumulated) = case, variant
    g = gradient(shape, layout, dtype, device)
    given = torch.rand_like(g[0], dtype=torch.float32)
    earlier = torch.rand_like(given) if accumulated else None
    channels = Channels(1 if len(shape) == 4 else len(shape) - 1, total=total)
    fused = prepare(g, given, (0,), known=update.is_known) if tile is None else Fused(g, 0, tile)
    assert fused is not None
    summed = sums_of(g, 0, channels)
    assert (summed is None) == (total is None)
    fused = Fused(g, 0, fused.tile, summed)
    torch.use_deterministic_algorithms(True)  # new memory holds NaN: what is not written shows
    try:
        found = fused(g, given, earlier, update)
    finally:
        torch.use_deterministic_algorithms(False)
    wide = None if earlier is None else earlier.double()
    expected = plain(g.double(), given.double(), wide, update, 0, channels)
    out, norm = found[:2]
    assert (out.dtype, norm.dtype) == (g.dtype, torch.float32)
    assert out.stride() == (g * 1).stride()
    assert norm.stride() == given.stride()
    rtol = ROUNDING[g.device.type, g.dtype]
    torch.testing.assert_close(out.double(), expected.product, rtol=rtol, atol=1e-7)
    # The interpreter adds up one row after the other, not as a tree: of 2000 squares of bfloat16
    # (a coarse grid, so that rounding errors do not cancel) 2e-6 is lost.
    rtol = 5e-6 if device == "cpu" and shape[0] > 1000 else 1e-6
    torch.testing.assert_close(norm.double(), expected.norm, rtol=rtol, atol=1e-7)
    if total is None:
        assert found.total is None
        return
    added = g.double() if total == "g" else expected.product
    sizes = added.abs().sum([axis for axis in range(g.dim()) if axis != channels.axis])
    assert found.total is not None
    assert expected.total is not None
    assert found.total.dtype == torch.float32
    assert ((found.total - expected.total).abs() <= 2e-6 * sizes + 1e-7).all()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def check_by_the_oracle(case, variant):
    compare_with_oracle("cpu", case, variant)


@pytest.mark.parametrize("total", ["g", "T(g)"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS[::2], ids=str)
def check_totals_by_the_oracle(case, variant, total):
    compare_with_oracle("cpu", case, variant, total)


def check_a_norm_in_another_order_is_taken_in():
    g = gradient((5, 16, 6, 4), CHANNELS_LAST, torch.float32)
    r = torch.rand_like(g[0])
    fused = prepare(g, r, (0,), known=True)
    assert fused is not None
    in_order, contiguous = fused(g, r, r, KNOWN), fused(g, r, r.contiguous(), KNOWN)
    assert torch.equal(in_order[1], contiguous[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's
def check_infinities_and_nans_show_in_the_norm():
    g = torch.ones(4, 20)
    g[1, 3], g[2, 7] = float("nan"), float("inf")
    fused = prepare(g, torch.ones(20), (0,), known=False)
    assert fused is not None
    norm = fused(g, torch.ones(20), None, UPDATE).norm
    assert norm.isfinite().logical_not().nonzero().flatten().tolist() == [3, 7]


def check_whole_numbers_are_as_good_as_others():
    g, r = torch.ones(4, 20), torch.ones(20)
    fused = prepare(g, r, (0,), known=False)
    assert fused is not None
    update = Update(0, 1, 1, 1)
    found, expected = fused(g, r, None, update), plain(g, r, None, update, axis=0)
    torch.testing.assert_close(found[:2], expected[:2])


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("stale", [False, True])
def check_rms_is_the_same_with_and_without_the_kernel(stale, per_sample, monkeypatch):
    shape = (6, 8, 3, 5)
    layout = read_layout(shape, frozenset({1}), batch_size=6)
    site = Site("c:conv2d(weight)", "conv2d", ("c.weight",), ("weight",), True, shape, layout)
    by_kernel, by_torch = (RMS(0.5, 0.8, 1e-3, per_sample=per_sample, stale=stale) for _ in "kt")
    for step in range(3):
        for _ in range(1 + step % 2):  # two backward passes before the second commit
            g = gradient(shape, CHANNELS_LAST, torch.float32) * (step + 1)
            product = by_kernel(g, site)
            with monkeypatch.context() as patch:
                patch.setattr(rms_fused, "prepare", lambda *_, **__: None)
                torch.testing.assert_close(product, by_torch(g, site))
        by_kernel.commit()
        by_torch.commit()
    running = by_kernel.sites.kept[site.key]
    assert running.kernels["T"][1] is not None
    assert by_torch.sites.kept[site.key].kernels["T"][1] is None
    torch.testing.assert_close(running.r, by_torch.state[site.key]["r"])


@pytest.mark.parametrize("stale", [False, True])
def test_the_oracle_is_what_rms_does(stale: bool) -> None:
    torch.manual_seed(0)
    layout = read_layout((4, 3), frozenset({1}), batch_size=4)
    site = Site("fc:linear(weight)", "linear", ("fc.weight",), ("weight",), True, (4, 3), layout)
    operator = RMS(0.5, 0.8, 1e-3, per_sample=False, stale=stale)
    r, earlier = torch.rand(3), None
    operator.state = {site.key: {"r": r.clone()}}
    for passes in (1, 2):
        g = torch.randn(4, 3)
        update = Update(1, 0, 0.5, 1e-3) if stale else Update(0.8, 0.2 / (4 * passes), 0.5, 1e-3)
        expected, earlier = plain(g, r, earlier, update, axis=0)[:2]
        torch.testing.assert_close(operator(g, site), expected)
    operator.commit()
    assert earlier is not None
    torch.testing.assert_close(operator.state[site.key]["r"], 0.8 * r + 0.2 / 8 * earlier.square())


@pytest.mark.slow
@needs_triton
def test_the_kernel_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_kernel_on_a_gpu(case: Case, variant: Variant) -> None:
    compare_with_oracle("cuda", case, variant)


LARGE: list[Case] = [
    ((8, 1024, 3072), CONTIGUOUS, None),
    ((128, 64, 56, 56), CHANNELS_LAST, None),
    ((2000, 4096), CONTIGUOUS, None),  # tiles of which shared memory would not hold three
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("total", ["g", "T(g)"])
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_totals_on_a_gpu(case: Case, variant: Variant, total: Total) -> None:
    compare_with_oracle("cuda", case, variant, total)


# ---------------------------------------------------------------- where it steps aside


def strided(shape: tuple[int, ...], *order: int) -> Tensor:
    """A tensor whose axes lie in memory in a given order, outermost first."""
    back = [order.index(axis) for axis in range(len(shape))]
    return torch.empty([shape[axis] for axis in order]).permute(back)


class Shard(Tensor):
    """As DTensor, a tensor that is not all its memory."""


@pytest.mark.parametrize(
    ("g", "r", "axis", "expected"),
    [
        pytest.param(torch.empty(4, 6), torch.empty(6), 0, True, id="contiguous"),
        pytest.param(strided((4, 3, 5), 0, 2, 1), strided((3, 5), 1, 0), 0, True, id="permuted"),
        pytest.param(strided((4, 3, 5), 0, 2, 1), torch.empty(3, 5), 0, False, id="r otherwise"),
        pytest.param(strided((3, 4, 5), 1, 0, 2), torch.empty(3, 5), 1, True, id="second axis"),
        pytest.param(torch.empty(3, 4, 5), torch.empty(3, 5), 1, False, id="time first"),
        pytest.param(strided((4, 6), 1, 0), torch.empty(6), 0, False, id="samples innermost"),
        pytest.param(torch.empty(4, 12)[:, ::2], torch.empty(6), 0, False, id="every other"),
        pytest.param(torch.empty(4, 1).expand(4, 6), torch.empty(6), 0, False, id="expanded"),
        pytest.param(torch.empty(4, 0), torch.empty(0), 0, False, id="empty"),
        pytest.param(torch.empty(4, 6).double(), torch.empty(6).double(), 0, False, id="double"),
        pytest.param(torch.empty(4, 6).cfloat(), torch.empty(6), 0, False, id="complex"),
        pytest.param(Shard(torch.empty(4, 6)), torch.empty(6), 0, False, id="shard"),
    ],
)
def test_which_memory_fits(g: Tensor, r: Tensor, axis: int, expected: bool) -> None:
    assert fits(g, r, axis) is expected


def test_plain_torch_where_positions_are_shared_or_nothing_can_be_launched() -> None:
    g = torch.ones(4, 3, 5)
    assert prepare(g, g[0, 0], (0, 1), known=True) is None
    assert prepare(g, g[0], (), known=True) is None
    assert prepare(g, g[0], (0,), known=True) is None  # on the CPU, outside the interpreter


def test_which_channels_are_summed_on_the_way() -> None:
    tokens, images = torch.empty(4, 3, 6), strided((4, 6, 3, 5), 0, 2, 3, 1)
    assert sums_of(tokens, 0, Channels(2, total="g")) == Summed(6, True, False)
    assert sums_of(tokens, 0, Channels(1, total="T(g)")) == Summed(3, False, True)
    assert sums_of(images, 0, Channels(1, total="g")) == Summed(6, True, False)
    assert sums_of(torch.empty(4, 6, 3, 5), 0, Channels(1, total="g")) == Summed(6, False, False)
    assert sums_of(torch.empty(4, 1, 3), 0, Channels(1, total="g")) == Summed(1, True, False)
    assert sums_of(tokens, 0, Channels(2)) is None
    assert sums_of(tokens, 0, Channels(0, total="g")) is None  # the samples
    assert sums_of(strided((4, 6, 3, 5), 0, 2, 1, 3), 0, Channels(1, total="g")) is None


def test_sums_that_are_nearly_as_large_as_g_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    monkeypatch.setattr(kernels, "_transform", lambda: {(n, 1, 1): None for n in range(9000)})
    monkeypatch.setattr(kernels, "processors_of", lambda device: 132)

    def summed(*shape: int) -> bool:
        g, channels = torch.empty(shape), Channels(len(shape) - 1, total="g")
        fused = prepare(g, g[0], (0,), known=True, channels=channels)
        assert fused is not None
        return fused.summed is not None

    assert summed(2, 50)  # one column is one channel: nothing more to sum
    assert summed(128, 20, 50)
    assert not summed(2, 20, 50)
    assert not summed(2, 1000, 1001)  # blocks of columns begin with other channels each
    assert summed(3, 2000, 768)


def test_plain_torch_for_long_columns_that_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    monkeypatch.setattr(kernels, "processors_of", lambda device: 132)
    assert prepare(torch.ones(9000, 10), torch.ones(10), (0,), known=False) is None
    assert prepare(torch.ones(9000, 10), torch.ones(10), (0,), known=True) is None


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("bytes_each", [2, 4])
@pytest.mark.parametrize("m", [1, 2, 3, 16, 100, 128, 256, 1000, 2048, 4096, 10_000])
@pytest.mark.parametrize("n", [1, 10, 4096, 16_384, 2_359_296])
def test_a_tile_holds_all_rows_fills_the_chip_and_does_not_spill(
    m: int, n: int, bytes_each: int, known: bool, summed: bool
) -> None:
    tile = choose_tile(m, n, bytes_each, processors=132, known=known, summed=summed)
    programs = -(-n // tile.columns)
    for size in (tile.rows, tile.columns, tile.warps):
        assert size & (size - 1) == 0
    assert tile.columns * bytes_each >= 32
    assert programs >= 132 or tile.columns * bytes_each == 32
    assert tile.whole == (tile.rows >= m)
    assert tile.rows * tile.columns <= 64 * 32 * tile.warps
    assert tile.warps <= 16


MISSING = """
import os, sys, torch
from virtualgrad import SVGD
assert "triton" not in sys.modules
os.environ["TRITON_INTERPRET"] = "1"
sys.modules["triton"] = None
from virtualgrad.operators.kernels import prepare
g = torch.ones(4, 6)
assert prepare(g, g[0], (0,), known=True) is None
"""


def test_triton_is_imported_late_and_may_be_missing() -> None:
    subprocess.run([sys.executable, "-c", MISSING], check=True)
