"""Numbers that are made into tensors once: every bit is what torch's own way gives."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from virtualgrad.operators.numbers import add_to_all, dtype_on_cpu, multiply_all

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_bit_changes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(5, dtype=dtype),
        torch.randn(2, 3, dtype=dtype),
        torch.tensor(0.3).to(dtype),
    ]
    expected = [(tensor * 0.9 + 1e-6) * 0.1 for tensor in tensors]
    on_cpu = dtype_on_cpu(tensors[0])
    multiply_all(tensors, 0.9, on_cpu)
    add_to_all(tensors, 1e-6, on_cpu)
    multiply_all(tensors, 0.1, on_cpu)
    assert all(map(torch.equal, tensors, expected))


def test_tensors_that_are_not_plain_ones_on_a_cpu_get_the_number_itself() -> None:
    assert dtype_on_cpu(torch.nn.Parameter(torch.zeros(2))) is None
    assert dtype_on_cpu(torch.zeros(2, device="meta")) is None
    tensors = [torch.ones(2, dtype=dtype) for dtype in DTYPES]  # of two kinds
    multiply_all(tensors, 0.9, None)
    add_to_all(tensors, 0.1, None)
    assert all(torch.equal(each, torch.ones_like(each) * 0.9 + 0.1) for each in tensors)


def test_a_number_that_is_a_tensor_is_taken_as_it_is() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    multiply_all(tensors, torch.tensor(0.5), torch.float32)
    add_to_all(tensors, torch.tensor(0.25), torch.float32)
    assert all(torch.equal(each, torch.full_like(each, 0.75)) for each in tensors)


def test_what_is_made_among_fake_tensors_is_not_kept() -> None:
    number = 0.123  # of no other test
    with FakeTensorMode():
        multiply_all([torch.ones(2)], number, torch.float32)
    tensors = [torch.ones(2)]
    multiply_all(tensors, number, torch.float32)
    assert torch.equal(tensors[0], torch.ones(2) * number)
