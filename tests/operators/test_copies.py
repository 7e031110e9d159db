"""Forgetting by a copy that a GPU makes only where something was counted.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.operators import compiled, copies, kernels
from virtualgrad.operators.copies import CopyIfCounted, prepare_copy


def compare(device: str, shape: tuple[int, ...], programs: int) -> None:
    source = torch.randn(shape, device=device)
    if len(shape) == 4:
        source = source.contiguous(memory_format=torch.channels_last)
    target, counts = torch.full_like(source, torch.nan), torch.zeros(3, device=device)
    before, copies.PROGRAMS_EACH = copies.PROGRAMS_EACH, programs
    try:
        copying = prepare_copy(target, source, counts)
    finally:
        copies.PROGRAMS_EACH = before
    assert isinstance(copying, CopyIfCounted)
    copying()
    assert target.isnan().all()
    counts[2] = torch.nan  # the number of the last graph does not matter
    copying()
    assert target.isnan().all()
    counts[0] = 4
    copying()
    assert torch.equal(target, source)


CASES = [((5,), 8), ((3 * 4096,), 2), ((7, 4099), 3), ((4, 30, 11, 13), 1)]


@pytest.mark.parametrize(("shape", "programs"), CASES, ids=str)
def check_a_copy_is_made_if_something_was_counted(shape, programs):
    compare("cpu", shape, programs)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], optimizer: SVGD) -> list[Tensor]:
    """Steps, with passes that are forgotten before, between, and behind them; a loaded state."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    saved = None
    for step in range(4):
        for _ in range(1 + step % 2):
            optimizer.zero_grad()
            run(torch.randn(6, 5)).square().mean().backward()  # the first of two is forgotten
        optimizer.step()
        found += [p.detach().clone() for p in model.parameters()]
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
    assert saved is not None
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    optimizer.step()  # of no pass: r stays as it was loaded
    state = optimizer.operator.state
    return found + [state[key]["r"].clone() for key in sorted(state)]


def check_compiled_steps_forget_as_eager_ones(monkeypatch):
    monkeypatch.setattr(compiled, "LARGE", 1)
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = copy.deepcopy(eager)
    theirs, ours = (SVGD(one, 0.1) for one in (eager, model))
    run = torch.compile(model, backend="aot_eager")
    expected, found = gradients(eager, eager, theirs), gradients(model, run, ours)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    kept = [site.compiled for site in ours.operator.sites.kept.values()]
    assert all(isinstance(one.restoring, CopyIfCounted) for one in kept)


def check_a_compiled_zero_grad_forgets_without_the_kernel(monkeypatch):
    monkeypatch.setattr(compiled, "LARGE", 1)
    model = nn.Linear(5, 7)
    optimizer = SVGD(model, 0.1)
    run = torch.compile(model, backend="aot_eager")
    zero_grad = torch.compile(optimizer.zero_grad, backend="aot_eager")
    for _ in range(2):
        run(torch.randn(6, 5)).square().mean().backward()
        zero_grad()
    (site,) = optimizer.operator.sites.kept.values()
    assert torch.equal(site.compiled.candidate, site.r)
    assert not site.compiled.counts.any()


@pytest.mark.slow
@needs_triton
def test_the_kernel_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize(("shape", "programs"), [*CASES, ((2**20 + 3,), 8)], ids=str)
def test_the_kernel_on_a_gpu(shape: tuple[int, ...], programs: int) -> None:
    compare("cuda", shape, programs)


def test_plain_torch_without_a_gpu_or_where_numbers_do_not_lie_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, counts = torch.zeros(4, 6), torch.zeros(3)
    assert prepare_copy(one, one, counts) is None
    monkeypatch.setattr(kernels, "may_launch", lambda device: True)
    monkeypatch.setattr(kernels, "is_usable", lambda device: True)
    assert prepare_copy(one, torch.zeros(6, 4).t(), counts) is None
    assert prepare_copy(one[:, ::2], torch.zeros(4, 6)[:, ::2], counts) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("large", [1, 2**30])
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")  # not wanted here
def test_captured_steps_forget_and_move_as_others(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay behind a pass that is to be forgotten; updates and copies in pieces."""
    monkeypatch.setattr(compiled, "LARGE", large)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 40)).cuda()
    other = copy.deepcopy(model)
    ours, theirs = (SVGD(one, 0.1) for one in (model, other))
    run = torch.compile(model, fullgraph=True)
    x, noise = torch.randn(2, 16, 30, 64, device="cuda").unbind()

    def step(run: Callable[[Tensor], Tensor], optimizer: SVGD) -> None:
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(run, ours)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(run, ours)
    for _ in range(2):
        run(noise).square().mean().backward()
        graph.replay()
    for _ in range(5):
        step(other, theirs)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    for key, state in theirs.operator.state.items():
        torch.testing.assert_close(ours.operator.state[key]["r"], state["r"], rtol=1e-3, atol=0)
