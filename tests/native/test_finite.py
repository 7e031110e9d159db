"""The look for NaN by C++ finds what Python's finds, in tensors of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import Tensor

from virtualgrad import native
from virtualgrad.operators.finite import nonfinite_indices

pytestmark = pytest.mark.usefixtures("in_cpp")

FORMATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [(), (1,), (7,), (4097,), (3, 5000), (0,)]
NOT_FINITE = [float("nan"), -float("nan"), float("inf"), -float("inf")]


def tensors(dtype: torch.dtype, device: str) -> list[Tensor]:
    """The largest and the smallest numbers among them."""
    made = [torch.randn(size).to(device, dtype) for size in SIZES]
    about = torch.finfo(dtype)
    extremes = [about.max, about.min, about.tiny, -0.0]
    made.append(torch.tensor(extremes, dtype=dtype, device=device))
    made.append(made[4].t())
    return made


def looked_at_by_cpp(some: list[Tensor]) -> Any:
    library = native.built()
    assert library is not None
    return library.look(some)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_finite_numbers(dtype: torch.dtype, device: str) -> None:
    some = tensors(dtype, device)
    assert nonfinite_indices(some) == []
    if device == "cpu" or dtype == torch.float32:  # on a GPU torch does not know all
        assert looked_at_by_cpp(some).tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", NOT_FINITE, ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_one_that_is_not(dtype: torch.dtype, number: float, device: str) -> None:
    """Wherever it stands, and the tensors are as they were."""
    for which, at in [(1, 0), (2, 6), (3, 0), (3, 4095), (3, 4096), (4, 14_999), (6, 3)]:
        some = tensors(dtype, device)
        some[which].view(-1)[at] = number
        before = [each.clone() for each in some]
        expected = [which, 7] if which == 4 else [which]
        assert nonfinite_indices(some) == expected
        torch.testing.assert_close(some, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "some",
    [
        [torch.ones(4), torch.ones(4, dtype=torch.float64)],
        [torch.ones(4), torch.ones(1).expand(4)],
        [torch.ones(4)[::2]],
        [torch.ones(2, dtype=torch.complex64)],
        [torch.ones(2, dtype=torch.int32)],
        [torch.ones(2, device="meta")],
        [torch.eye(2).to_sparse()],
    ],
    ids=["two dtypes", "expanded", "gaps", "complex", "integers", "nowhere", "sparse"],
)
def test_others_are_left_to_python(some: list[Tensor]) -> None:
    assert looked_at_by_cpp(some) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_many_numbers(dtype: torch.dtype) -> None:
    """Of which the sum is asked first: it may overflow where no number does."""
    many = torch.full((300, 500), torch.finfo(dtype).max, dtype=dtype)
    assert many.sum().isinf()
    assert looked_at_by_cpp([many]).tolist() == [0]
    for numbers in ([float("nan")], [float("inf")], [float("inf"), -float("inf")]):
        for at in (0, 149_998):
            spoilt = torch.randn(300, 500, dtype=dtype)
            spoilt.view(-1)[at : at + len(numbers)] = torch.tensor(numbers, dtype=dtype)
            assert looked_at_by_cpp([spoilt]).tolist() == [1]
