"""Steps for which nobody waits: those that are waited for are the oracle.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import ON_A_GPU
from interpreted import needs_triton, run_checks
from torch import Tensor
from torch._functorch import config as functorch_config
from unwaited_steps import READINGS, Make, batch, kept, network, pass_through

from virtualgrad import SVGD
from virtualgrad.errors import RetainedGraphError
from virtualgrad.operators import addresses
from virtualgrad.optim.unwaited import Unwaited

STEPS, SPOILT = 5, 2


def trained(device: str, make: Make, monkeypatch: Any, *, waits: bool) -> list[Tensor]:
    model = network(device)
    optimizer = make(model)
    with monkeypatch.context() as patch:
        if waits:
            patch.setattr(Unwaited, "step", lambda *_: False)
        for number in range(STEPS):
            pass_through(model, optimizer, batch(number, device))
            optimizer.step()
        assert (optimizer._unwaited._last is None) == waits
    return kept(model, optimizer)


def compare(device: str, reading: str, monkeypatch: Any) -> None:
    expected = trained(device, READINGS[reading], monkeypatch, waits=True)
    found = trained(device, READINGS[reading], monkeypatch, waits=False)
    with monkeypatch.context() as patch:
        patch.setattr(addresses, "FEW", -1)  # as those of a large network
        copied = trained(device, READINGS[reading], monkeypatch, waits=False)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, copied))
    for one, other in zip(found, expected, strict=True):
        if device == "cuda":
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def compare_skipped(device: str, reading: str, *, spoilt_by: float) -> None:
    """A step with a NaN is as if it had never been, and is told of by the next one."""
    make = READINGS[reading]
    whole, model = network(device), network(device)
    theirs, ours = make(whole), make(model, nonfinite="skip")
    for number in range(STEPS):
        pass_through(model, ours, batch(number, device) * (spoilt_by if number == SPOILT else 1))
        ours.step()
        if number == SPOILT:
            for module, other in zip(whole.modules(), model.modules(), strict=True):
                for name, value in module.named_buffers(recurse=False):
                    value.copy_(getattr(other, name))  # what the forward pass has written
            continue
        pass_through(whole, theirs, batch(number, device))
        theirs.step()
    for one, other in zip(kept(model, ours), kept(whole, theirs), strict=True):
        assert torch.equal(one, other)


def compare_compiled(device: str, monkeypatch: Any) -> None:
    """Compiled passes write the new r themselves; a NaN there goes, too."""
    found: list[list[Tensor]] = []
    for waits in (True, False):
        torch._dynamo.reset()
        model = network(device)
        optimizer = SVGD(model, 0.1, nonfinite="skip")
        run = torch.compile(model, backend="aot_eager")
        with monkeypatch.context() as patch:
            if waits:
                patch.setattr(Unwaited, "step", lambda *_: False)
            for number in range(STEPS):
                optimizer.zero_grad()
                x = batch(number, device)
                loss = run(x).square().mean()
                (loss * torch.nan if number == SPOILT else loss).backward()
                optimizer.step()
            assert (optimizer._unwaited._last is None) == waits
        found.append(kept(model, optimizer))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def refuse_a_second_pass(device: str) -> None:
    torch._dynamo.reset()
    model = network(device)
    optimizer = SVGD(model, 0.1)
    run = torch.compile(model, backend="aot_eager")
    with functorch_config.patch(donated_buffer=False):  # so that graphs may be kept
        run(batch(0, device)).square().mean().backward()
        optimizer.step()
        before = kept(model, optimizer)
        optimizer.zero_grad()
        loss = run(batch(1, device)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    with pytest.raises(RetainedGraphError, match="second backward pass"):
        optimizer.settle()
    assert all(map(torch.equal, kept(model, optimizer), before))


def another_layout(model: Any, optimizer: Any) -> None:
    weight = model[8].weight
    weight.grad = weight.grad.t().contiguous().t()


def several_ranks(model: Any, optimizer: Any) -> None:
    optimizer.operator.ranks = object()
    assert optimizer.operator.guarded_commit(None) is None
    optimizer.operator.ranks = None
    optimizer._transaction.guarded_commit = lambda guard: None


def as_it_is(model: Any, optimizer: Any) -> None:
    pass


OTHERS: list[tuple[Make, Callable[[Any, Any], None]]] = [
    (lambda model: SVGD(model, torch.tensor(0.1)), as_it_is),
    (lambda model: SVGD(model, 0.1, nonfinite="ignore"), as_it_is),
    (lambda model: SVGD(model.double(), 0.1), as_it_is),
    (lambda model: SVGD(model, 0.1, momentum=0.9), as_it_is),  # it has no buffers yet
    (lambda model: SVGD(model, 0.1), another_layout),
    (lambda model: SVGD(model, 0.1), several_ranks),
]


def leave_the_rest_to_others(device: str) -> None:
    """What only the host can decide on, or no kernel takes, is waited for."""
    for make, change in OTHERS:
        model = network(device)
        optimizer = make(model)
        dtype = next(model.parameters()).dtype
        pass_through(model, optimizer, batch(0, device).to(dtype))
        change(model, optimizer)
        before = model[8].weight.detach().clone()
        optimizer.step()
        assert optimizer._unwaited._last is None
        assert not torch.equal(model[8].weight, before)


@pytest.mark.parametrize("reading", READINGS)
def check_steps(reading, monkeypatch):
    compare("cpu", reading, monkeypatch)


@pytest.mark.parametrize("spoilt_by", [torch.nan, torch.inf])
@pytest.mark.parametrize("reading", ["Algorithm 1", "released", "momentum"])
def check_skipped(reading, spoilt_by):
    compare_skipped("cpu", reading, spoilt_by=spoilt_by)


def check_compiled(monkeypatch):
    compare_compiled("cpu", monkeypatch)
    refuse_a_second_pass("cpu")


def check_the_rest():
    leave_the_rest_to_others("cpu")


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("reading", READINGS)
def test_steps_on_a_gpu(device: str, reading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(device, reading, monkeypatch)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("spoilt_by", [torch.nan, torch.inf])
def test_skipped_on_a_gpu(device: str, reading: str, spoilt_by: float) -> None:
    compare_skipped(device, reading, spoilt_by=spoilt_by)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_compiled_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_compiled(device, monkeypatch)
    refuse_a_second_pass(device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_the_rest_on_a_gpu(device: str) -> None:
    leave_the_rest_to_others(device)
