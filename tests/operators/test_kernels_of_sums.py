"""The kernels of shared positions, against float64; and training with all kernels, or without.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor, nn

from virtualgrad import SVGD, weights_only
from virtualgrad.operators import kernels_of_sums, rms_fused
from virtualgrad.operators.kernels_of_norms import NormBackward
from virtualgrad.operators.kernels_of_sums import Squares, prepare_squares

CHANNELS_LAST = torch.channels_last
CONTIGUOUS = torch.contiguous_format

SquaresCase = tuple[tuple[int, ...], int, torch.dtype, int]
SQUARES_CASES: list[SquaresCase] = [
    ((300, 8), 1, torch.float32, 1),
    ((7, 11, 24), 2, torch.float32, 132),
    ((5, 16, 6, 4), 1, torch.float32, 132),  # channels-last
    ((1, 8), 1, torch.float32, 132),
    ((1025, 136), 1, torch.bfloat16, 4),  # three blocks of columns, rows in many parts
    ((2100, 64), 1, torch.float32, 132),  # more parts than are added up by 32 columns at a time
    ((33, 40), 1, torch.float16, 1),
]
LARGE_CASES: list[SquaresCase] = [  # a minute of the interpreter's
    ((4097, 136), 1, torch.bfloat16, 132),
    ((16500, 64), 1, torch.float32, 132),
]


def compare_squares(device: str, case: SquaresCase) -> None:
    shape, axis, dtype, processors = case
    torch.manual_seed(sum(shape))
    g = torch.randn(shape, device=device).to(dtype)
    g = g.contiguous(memory_format=CHANNELS_LAST) if len(shape) == 4 else g
    assert isinstance(prepare_squares(g, axis), Squares)
    with mock.patch.object(kernels_of_sums, "processors_of", lambda device: processors):
        found, nothing = Squares(g, axis)(g)
        again, total = Squares(g, axis, is_summed=True)(g)
    assert nothing is None
    assert total is not None
    assert torch.equal(found, again)
    axes = [other for other in range(len(shape)) if other != axis]
    expected = g.double().square().sum(axes).sqrt()
    # The interpreter adds one row after the other, not as a tree.
    torch.testing.assert_close(found.double(), expected, rtol=5e-6, atol=1e-7)
    sizes = g.double().abs().sum(axes)
    assert ((total - g.double().sum(axes)).abs() <= 2e-6 * sizes).all()


@pytest.mark.parametrize("case", SQUARES_CASES, ids=str)
def check_squares(case):
    compare_squares("cpu", case)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 4)


@pytest.mark.parametrize("order", [CONTIGUOUS, CHANNELS_LAST], ids=str)
@pytest.mark.parametrize("released", [False, True])
def check_training_is_the_same_with_and_without_the_kernels(released, order, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),  # before a norm that of a bias is a rounding error
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 4, bias=False),
        nn.BatchNorm1d(4),
    ).to(memory_format=order)
    models = [model, copy.deepcopy(model)]
    options = {"rho": 0.8, "share_positions": True, "where": lambda site: True} if released else {}
    make = SVGD.released if released else SVGD
    optimizers = [make(one, 0.1, **options) for one in models]
    for step in range(3):
        for _ in range(1 + step % 2):  # two backward passes before the second step
            x = torch.randn(16, 3, 4, 4).contiguous(memory_format=order)
            loss_of(models[0], x).backward()
            with monkeypatch.context() as patch:
                for name in ("prepare", "prepare_norm", "prepare_squares"):
                    patch.setattr(rms_fused, name, lambda *_, **__: None)
                loss_of(models[1], x).backward()
        for one, other in zip(*(m.parameters() for m in models), strict=True):
            assert (one.grad - other.grad).norm() <= 5e-6 * other.grad.norm()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        models[1].load_state_dict(model.state_dict())  # each step by itself, or errors add up
    used = {
        purpose: type(kernel)
        for running in optimizers[0].operator.sites.kept.values()
        for purpose, (_, kernel) in running.kernels.items()
        if kernel is not None
    }
    channels_last = order is CHANNELS_LAST
    assert used.get("norm") is NormBackward
    assert used.get("squares") is (Squares if released and channels_last else None)


READINGS = {
    "algorithm 1": {},
    "released": {"per_sample": False, "stale": True, "where": weights_only},
    "stale": {"stale": True},
    "shared": {"share_positions": True},
    "shared, released": {"share_positions": True, "stale": True, "where": weights_only},
}


@pytest.mark.parametrize("order", [CONTIGUOUS, CHANNELS_LAST], ids=str)
@pytest.mark.parametrize("reading", READINGS)
def check_biases_are_the_same_with_and_without_sums_on_the_way(reading, order, monkeypatch):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(2), nn.Linear(4, 16), nn.GELU())
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4)).to(memory_format=order)
    models = [model, copy.deepcopy(model)]
    optimizers = [SVGD(one, 0.1, **READINGS[reading]) for one in models]
    for step in range(2):
        for _ in range(1 + step):
            x = torch.randn(16, 3, 4, 4).contiguous(memory_format=order)
            loss_of(models[0], x).backward()
            with monkeypatch.context() as patch:
                for name in ("prepare", "prepare_squares"):
                    patch.setattr(rms_fused, name, lambda *_, **__: None)
                loss_of(models[1], x).backward()
        for one, other in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        models[1].load_state_dict(model.state_dict())
    kept = optimizers[0].operator.sites.kept.values()
    kernels = [kernel for running in kept for _, kernel in running.kernels.values()]
    sums = [getattr(kernel, "summed", getattr(kernel, "is_summed", None)) for kernel in kernels]
    # An r that is shared over positions of contiguous images is torch's.
    assert sum(bool(one) for one in sums) >= (2 if "shared" in reading else 3)


@pytest.mark.slow
@needs_triton
def test_the_kernels_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("case", SQUARES_CASES + LARGE_CASES, ids=str)
def test_the_kernels_on_a_gpu(case: SquaresCase) -> None:
    compare_squares("cuda", case)


# ---------------------------------------------------------------- where they step aside


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("virtualgrad.operators.kernels_of_sums.is_usable", lambda device: True)


@needs_triton
@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("g", "axis"),
    [
        pytest.param(torch.empty(4, 8, 3, 3), 1, id="channels in the middle"),
        pytest.param(torch.empty(4, 6), 1, id="six columns"),
        pytest.param(torch.empty(0, 8), 1, id="empty"),
        pytest.param(torch.empty(4, 16)[:, :8], 1, id="rows apart"),
        pytest.param(torch.empty(1, 8).expand(4, 8), 1, id="expanded"),
        pytest.param(torch.empty(4, 8).double(), 1, id="double"),
    ],
)
def test_squares_by_plain_torch(g: Tensor, axis: int) -> None:
    assert prepare_squares(torch.empty(4, 8), 1) is not None
    assert prepare_squares(g, axis) is None


def test_nothing_is_launched_without_a_gpu() -> None:
    g = torch.empty(4, 8)
    assert prepare_squares(g, 1) is None
