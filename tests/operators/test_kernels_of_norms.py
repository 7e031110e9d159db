"""The kernels of a batch norm's backward pass under T, against float64.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor

from virtualgrad.operators import columns, kernels_of_norms
from virtualgrad.operators.columns import split_columns
from virtualgrad.operators.kernels import Update
from virtualgrad.operators.kernels_of_norms import Norm, prepare_norm, pull_back

FIRST = Update(rho=0.9, weight=0.1 * 7, scale=0.5, eps=1e-3)
STALE = Update(rho=1.0, weight=0.0, scale=0.5, eps=1e-3)
CHANNELS_LAST = torch.channels_last
CONTIGUOUS = torch.contiguous_format

NormCase = tuple[tuple[int, ...], torch.memory_format, torch.dtype, torch.dtype, Update, bool]
NORM_CASES: list[NormCase] = [
    ((32, 10), CONTIGUOUS, torch.float32, torch.float32, FIRST, False),
    ((33, 100), CONTIGUOUS, torch.float32, torch.float32, FIRST, True),
    ((1, 3, 2, 2), CONTIGUOUS, torch.float32, torch.float32, STALE, False),
    ((70, 6, 3, 5), CHANNELS_LAST, torch.float32, torch.float32, FIRST, True),
    ((70, 6, 3, 5), CONTIGUOUS, torch.float32, torch.float32, STALE, False),
    ((5, 1, 4, 4), CHANNELS_LAST, torch.float32, torch.float32, FIRST, False),
    ((16, 8, 5), CONTIGUOUS, torch.bfloat16, torch.bfloat16, FIRST, False),
    ((16, 8, 5, 5), CHANNELS_LAST, torch.float32, torch.bfloat16, FIRST, False),
    ((16, 8, 5, 5), CHANNELS_LAST, torch.float16, torch.float16, STALE, True),
    # more columns than there are at once, and as many as the other tile is for
    ((3, 16, 48, 48), CHANNELS_LAST, torch.bfloat16, torch.bfloat16, FIRST, False),
    ((18, 16, 64, 64), CHANNELS_LAST, torch.float32, torch.float32, FIRST, False),
]


def compare_norm(device: str, case: NormCase) -> None:
    shape, order, dtype, dtype_x, update, has_earlier = case
    torch.manual_seed(sum(shape))

    def random(dtype: torch.dtype) -> Tensor:
        t = torch.randn(shape, device=device).to(dtype)
        return t.contiguous(memory_format=order) if len(shape) == 4 else t

    g, x = random(dtype), random(dtype_x)
    mean, deviation, weight = torch.randn(3, shape[1], device=device)
    norm = Norm(x, mean, deviation.abs() + 0.5, weight)
    r = torch.rand_like(g[0], dtype=torch.float32)
    earlier = torch.rand_like(r) if has_earlier else None
    fused = prepare_norm(g, x, r, (0,))
    assert fused is not None
    found, root = fused(g, norm, r, earlier, update, torch.empty_like(g, dtype=dtype_x))
    wide, channel = g.double(), (1, -1, *[1] * (len(shape) - 2))
    squares = wide.square().sum(0) + (0 if earlier is None else earlier.double().square())
    rho, by, scale, eps = update
    transformed = wide * scale * torch.rsqrt(rho * r.double() + by * squares + eps)
    mean, deviation, w = (t.double().view(channel) for t in norm[1:])
    hat = (x.double() - mean) * deviation
    axes = [axis for axis in range(len(shape)) if axis != 1]
    close = {"rtol": 2e-6, "atol": 2e-5}
    torch.testing.assert_close(found.weight.double(), (transformed * hat).sum(axes), **close)
    torch.testing.assert_close(found.bias.double(), transformed.sum(axes), **close)
    torch.testing.assert_close(root.double(), squares.sqrt(), rtol=1e-6, atol=1e-7)
    assert root.stride() == r.stride()
    of_product, of_g = ((wide * by).mean(axes, keepdim=True) for by in (hat, 1))
    expected = w * deviation * (wide - of_g - hat * of_product)
    assert found.input is not None
    assert found.input.dtype == x.dtype
    assert found.input.stride() == g.stride()
    # of a number in half precision the last bit, and of one in float32 what sums lose
    rtol = max(2e-6, torch.finfo(x.dtype).eps)
    torch.testing.assert_close(found.input.double(), expected, rtol=rtol, atol=2e-5)
    alone, _ = fused(g, norm, r, earlier, update, None)
    assert alone.input is None
    assert torch.equal(alone.weight, found.weight)
    if dtype == dtype_x:
        overwritten, _ = fused(g, norm, r, earlier, update, g)
        assert overwritten.input is g
        assert torch.equal(g, found.input)


@pytest.mark.parametrize("case", NORM_CASES[:-2], ids=str)  # a minute and two for the others
def check_batch_norm(case):
    compare_norm("cpu", case)


@pytest.mark.parametrize("case", NORM_CASES[3:-2], ids=str)
def check_batch_norm_of_many_columns(case, monkeypatch):
    monkeypatch.setattr(kernels_of_norms, "MANY_COLUMNS", 1)  # the other tile
    compare_norm("cpu", case)


@pytest.mark.parametrize("case", NORM_CASES[:-2], ids=str)
def check_batch_norm_of_few_programs(case, monkeypatch):
    monkeypatch.setattr(kernels_of_norms, "MOST_PROGRAMS", 2)  # one block after the other
    monkeypatch.setattr(columns, "MOST_POSITIONS", 9)
    compare_norm("cpu", case)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5, 5)])
def check_a_weight_with_gaps(shape):
    torch.manual_seed(0)
    g, x = torch.randn(2, *shape).unbind()
    norm = Norm(x, torch.randn(4), torch.rand(4), torch.randn(4, 3)[:, 1])
    fused = prepare_norm(g, x, torch.rand_like(g[0]), (0,))
    found = fused(g, norm, torch.rand_like(g[0]), None, FIRST, torch.empty_like(g))[0].input
    hat = (x - by_channel(norm.mean, x)) * by_channel(norm.deviation, x)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    torch.testing.assert_close(found, pull_back(g, norm, (g * hat).sum(axes), g.sum(axes)))


def by_channel(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.dim() - 2))


@pytest.mark.slow
@needs_triton
def test_the_kernels_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize(
    ("case", "most"),  # programs: all blocks at once, or one after the other
    [(case, 2112) for case in NORM_CASES] + [(case, 2) for case in NORM_CASES[:-2]],
    ids=str,
)
def test_the_kernels_on_a_gpu(case: NormCase, most: int) -> None:
    with mock.patch.object(kernels_of_norms, "MOST_PROGRAMS", most):
        compare_norm("cuda", case)


def test_the_formula_is_the_gradient_of_a_batch_norm() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    weight, bias, g = torch.randn(3).double(), torch.randn(3).double(), torch.randn_like(x)
    sigma = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    (expected,) = torch.autograd.grad(sigma, x, g)
    variance, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
    norm = Norm(x.detach(), mean, torch.rsqrt(variance + 1e-5), weight)
    hat = (norm.x - mean.view(3, 1, 1)) * norm.deviation.view(3, 1, 1)
    found = pull_back(g, norm, (g * hat).sum((0, 2, 3)), g.sum((0, 2, 3)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 6, 16, 48, 64, 1000])
@pytest.mark.parametrize("positions", [1, 49, 12544])
def test_each_column_is_taken_once_and_by_a_program_of_its_channel(
    channels: int, positions: int
) -> None:
    n, columns = channels * positions, 32
    programs, width, blocks = split_columns(n, channels, columns, last=True, most=2112)
    if blocks == 1:
        assert (programs, width) == (-(-n // columns), n)
        return
    assert width == programs * columns
    assert width % channels == 0
    assert (blocks - 1) * width < n <= blocks * width


def test_channels_that_lie_outermost_are_not_added_up_on_the_way() -> None:
    assert split_columns(2**20, 64, 32, last=False, most=2112) == (2**15, 2**20, 1)


# ---------------------------------------------------------------- where they step aside


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_of_norms, "is_usable", lambda device: True)


@needs_triton
@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("x", "averaged"),
    [
        pytest.param(torch.empty(4, 8, 3, 3), (0, 2, 3), id="shared positions"),
        pytest.param(torch.empty(4, 8, 3, 3, dtype=torch.float64), (0,), id="double"),
        pytest.param(
            torch.empty(4, 8, 3, 3).contiguous(memory_format=CHANNELS_LAST), (0,), id="otherwise"
        ),
    ],
)
def test_batch_norm_by_plain_torch(x: Tensor, averaged: tuple[int, ...]) -> None:
    g = torch.empty(4, 8, 3, 3)
    assert prepare_norm(g, torch.empty_like(g), g[0], (0,)) is not None
    assert prepare_norm(g, x, g[0], averaged) is None


@needs_triton
@pytest.mark.usefixtures("usable")
def test_long_columns_and_few_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_of_norms, "processors_of", lambda device: 132)
    few, many = torch.empty(4096, 64), torch.empty(4096, 8192)
    assert prepare_norm(few, few, few[0], (0,)) is None
    assert prepare_norm(many, many, many[0], (0,)) is not None


def test_nothing_is_launched_without_a_gpu() -> None:
    g = torch.empty(4, 8)
    assert prepare_norm(g, g, g[0], (0,)) is None
