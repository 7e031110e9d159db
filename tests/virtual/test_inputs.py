"""The number of samples is found in whatever a model takes its tensors in."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from virtualgrad import SVGD, operators, virtual_grad
from virtualgrad.virtual.inputs import batch_size

SAMPLES, LENGTH = 8, 5


@dataclass
class Batch:
    """Of the usual kind: other things stand before the tensor, and it may be part of another."""

    name: str
    x: Any
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Slotted:
    """A dataclass without a __dict__."""

    x: Tensor


class Pair(NamedTuple):
    """A tuple with names."""

    name: str
    x: Tensor


class Own:
    """A class of the user's own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Folding(nn.Module):
    """Folds samples and positions into rows, as GPT-2 does: only the inputs tell how many."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, batch: Any) -> Tensor:
        x = self.read(batch)
        return self.second(self.first(x.flatten(0, 1)).tanh()).unflatten(0, (-1, LENGTH))


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda batch: batch),
    "dict": (lambda x: {"x": x}, lambda batch: batch["x"]),
    "named tuple": (lambda x: Pair("train", x), lambda batch: batch.x),
    "user dict": (lambda x: UserDict({"x": x}), lambda batch: batch["x"]),
    "dataclass": (lambda x: Batch("train", x), lambda batch: batch.x),
    "dataclass with slots": (Slotted, lambda batch: batch.x),
    "dataclass in a dataclass": (
        lambda x: Batch("outer", Batch("inner", x)),
        lambda batch: batch.x.x,
    ),
    "user dict in a list": (lambda x: [UserDict({"x": x})], lambda batch: batch[0]["x"]),
    "namespace": (lambda x: SimpleNamespace(x=x), lambda batch: batch.x),
    "class of its own": (Own, lambda batch: batch.x),
}


def folding(read: Callable[[Any], Tensor]) -> tuple[Folding, Tensor]:
    torch.manual_seed(0)
    return Folding(read).double(), torch.randn(SAMPLES, LENGTH, 4).double()


def assert_gradients(model: Folding, x: Tensor) -> None:
    """They are those of T with the samples counted, as the recorded graph has them."""
    plain = copy.deepcopy(model)
    plain.read = lambda batch: batch
    loss = plain(x).square().mean()
    expected = virtual_grad(loss, list(plain.parameters()), operators.RMS(), batch_size=SAMPLES)
    for p, v in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, v, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_a_plain_tensor(kind: str) -> None:
    wrap, read = KINDS[kind]
    model, x = folding(read)
    with SVGD(model, 0.1):
        model(wrap(x)).square().mean().backward()
    assert_gradients(model, x)


@pytest.mark.parametrize("kind", ["dataclass", "user dict", "class of its own"])
def test_they_are_found_in_a_compiled_model(kind: str) -> None:
    if kind == "class of its own" and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11 does not trace it")
    torch._dynamo.reset()
    wrap, read = KINDS[kind]
    model, x = folding(read)
    with SVGD(model, 0.1):
        torch.compile(model, backend="eager", fullgraph=True)(wrap(x)).square().mean().backward()
    assert_gradients(model, x)


def test_tensors_come_in_the_order_of_the_arguments() -> None:
    x, weights = torch.randn(8, 4), torch.randn(5)
    assert batch_size(((Batch("train", x), weights), {}), 0) == 8
    assert batch_size(((weights, UserDict({"x": x})), {}), 0) == 5
    # An object of no known kind may hold anything: it is asked if there is nothing else.
    assert batch_size(((Own(weights),), {"x": x}), 0) == 8
    packed = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    assert batch_size(((Batch("packed", packed),), {}), 0) == 2


def test_a_batch_that_holds_itself_is_no_endless_one() -> None:
    batch = Batch("round", None)
    batch.x = batch
    assert batch_size(((batch,), {}), 0) is None


def test_inputs_without_a_tensor_are_told_of_once() -> None:
    x = torch.randn(SAMPLES, LENGTH, 4).double()
    model, _ = folding(lambda batch: x)
    with SVGD(model, 0.1):
        message = r"Folding was called with list, .*number of samples.*tensors, tuples, dicts"
        with pytest.warns(UserWarning, match=message):
            model(["some", "words"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(["some", "words"])
    with SVGD(model, 0.1), warnings.catch_warnings():
        warnings.simplefilter("error")
        model("train")  # a word or a number is an option, and no batch
