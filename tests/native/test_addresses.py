"""Where tensors lie and how, by C++, is what Python tells of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from virtualgrad import native
from virtualgrad.operators.addresses import _write

pytestmark = pytest.mark.usefixtures("in_cpp")


def kinds(device: str) -> list[Tensor]:
    """No two of them are laid out alike."""
    one = torch.randn(6, 4, 3, 3, device=device)
    return [
        one,
        one.contiguous(memory_format=torch.channels_last),
        one.view(24, 9),
        one.view(24, 9).t(),
        one[1:],
        one.view(-1)[1:],  # not aligned
        one.view(-1)[2:217],
        one.double(),
        one.half(),
        torch.empty(0, device=device),
        torch.tensor(1.0, device=device),
    ]


def told(tensors: list[Any], *, in_cpp: bool) -> tuple[Any, list[int]]:
    into = torch.zeros(len(tensors) + 1, dtype=torch.int64)
    native.use(in_cpp)
    try:
        layout = _write(tensors, into)
    finally:
        native.use(True)
    assert isinstance(layout, bytes if in_cpp else tuple) or layout is None
    assert into[-1] == 0
    return layout, into[:-1].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_addresses_and_layouts(device: str) -> None:
    some = kinds(device)
    expected = [tensor.data_ptr() for tensor in some]
    assert told(some, in_cpp=True)[1] == told(some, in_cpp=False)[1] == expected
    for in_cpp in (True, False):
        layouts = [told([tensor], in_cpp=in_cpp)[0] for tensor in some]
        for one, other in itertools.combinations(layouts, 2):
            assert one != other
        again = [tensor.clone() for tensor in some if tensor.data_ptr() % 16 == 0]
        assert told(again, in_cpp=in_cpp)[0] == told(again, in_cpp=in_cpp)[0]
    assert told([nn.Parameter(some[0])], in_cpp=True)[0] == told(some[:1], in_cpp=True)[0]
    assert told([], in_cpp=True)[1] == []


@pytest.mark.parametrize("by_cpp", [True, False])
def test_what_is_more_than_its_memory_is_not_taken(by_cpp: bool) -> None:
    plain = torch.randn(3)
    two: Any = TwoTensor(plain, torch.randn(3))  # type: ignore[no-untyped-call]
    assert told([plain, two], in_cpp=by_cpp)[0] is None
    complex_numbers = torch.randn(3, dtype=torch.complex64).conj()
    for other in (
        torch.randn(3).to_mkldnn(),
        torch.randn(3).to_sparse(),
        complex_numbers,
        complex_numbers.imag,  # its memory has the other sign
        torch._efficientzerotensor(3),
    ):
        assert told([plain, other], in_cpp=by_cpp)[0] is None


@pytest.mark.parametrize("by_cpp", [True, False])
def test_numbers_are_float64_and_have_a_layout_of_their_own(by_cpp: bool) -> None:
    tensor = torch.randn(3)
    numbers = [0.1, -0.0, 1e300]
    layout, written = told([tensor, *numbers], in_cpp=by_cpp)
    assert torch.tensor(written[1:]).view(torch.float64).tolist() == numbers
    assert told([tensor, 1.0, 2.0, 3.0], in_cpp=by_cpp)[0] == layout
    assert told([1.0, tensor, 2.0, 3.0], in_cpp=by_cpp)[0] != layout


def test_what_cannot_be_written_is_refused() -> None:
    library: Any = native.built()
    tensors = [torch.randn(2), torch.randn(2)]
    with pytest.raises(RuntimeError, match="no room for 2"):
        library.write_addresses(tensors, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="64 bits"):
        library.write_addresses(tensors, torch.zeros(2))
    with pytest.raises(RuntimeError, match="neither a tensor"):
        library.write_addresses([*tensors, "three"], torch.zeros(3, dtype=torch.int64))
