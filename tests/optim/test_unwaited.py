"""Steps for which nobody waits: those that are waited for are the oracle, and NaN comes to light.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from devices import ON_A_GPU
from interpreted import needs_triton, run_checks
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from virtualgrad import SVGD, VirtualGradientDescent, operators
from virtualgrad.errors import NonFiniteError, RetainedGraphError
from virtualgrad.operators import addresses
from virtualgrad.operators.guard import Guard
from virtualgrad.optim.unwaited import Unwaited
from virtualgrad.settings.trial import try_svgd

STEPS, SPOILT = 5, 2
Make = Callable[..., VirtualGradientDescent]

READINGS: dict[str, Make] = {
    "Algorithm 1": lambda model, **more: SVGD(model, 0.1, **more),
    "released": lambda model, **more: SVGD.released(model, 0.1, 0.01, **more),
    "shared": lambda model, **more: SVGD.released(model, 0.1, 0.01, share_positions=True, **more),
    "momentum": lambda model, **more: SVGD(model, 0.1, momentum=0.9, weight_decay=0.1, **more),
    "groups": lambda model, **more: SVGD(
        model,
        0.1,
        params=[
            {
                "params": [p for n, p in model.named_parameters() if "0" in n],
                "lr": 0.05,
                "rho": 0.5,
            },
            {"params": [p for n, p in model.named_parameters() if "0" not in n]},
        ],
        **more,
    ),
    "the identity": lambda model, **more: VirtualGradientDescent(model, 0.1, **more),
    "sign": lambda model, **more: VirtualGradientDescent(model, 0.1, operators.Sign(), **more),
}


class Added(nn.Module):
    """Position embeddings: their r is of values for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(6, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        Added(),
        nn.Conv2d(6, 4, 3),
        nn.Flatten(),
        nn.Linear(36, 7),
        nn.Tanh(),
        nn.Linear(7, 2),
    ).to(device)


def batch(number: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 3, 5, 5, generator=generator).to(device)


def pass_through(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()


def kept(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Parameters, and the state of the optimizer; not what a forward pass has written."""
    found = [parameter.detach().clone() for parameter in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found


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


def tell(device: str) -> None:
    model = network(device)
    optimizer = SVGD.released(model, 0.1, 0.01)
    pass_through(model, optimizer, batch(0, device))
    optimizer.step()
    before = kept(model, optimizer)

    def spoil() -> None:
        pass_through(model, optimizer, batch(1, device))
        model[6].weight.grad[0, 0] = torch.inf
        optimizer.step()

    spoil()  # nobody waits
    assert all(map(torch.equal, (p.detach() for p in model.parameters()), before))
    pass_through(model, optimizer, batch(2, device))
    with pytest.raises(NonFiniteError, match=r"at 6\.weight in the last step"):
        optimizer.step()
    assert all(map(torch.equal, kept(model, optimizer), before))  # nor was this one made
    optimizer.settle()  # told once
    spoil()
    with pytest.raises(NonFiniteError, match="in the last step"):
        optimizer.settle()
    spoil()
    with pytest.raises(NonFiniteError, match="in the last step"):
        optimizer.state_dict()
    spoil()
    optimizer.load_state_dict(SVGD.released(network(device), 0.1).state_dict())
    optimizer.settle()  # it was of another state
    pass_through(model, optimizer, batch(1, device) * torch.nan)
    optimizer.step()
    with pytest.raises(NonFiniteError, match=r"at 8:linear\(weight\) and 3 more in the last step"):
        optimizer.settle()
    spoil()
    with pytest.raises(NonFiniteError, match="in the last step"):
        optimizer.detach()
    assert type(model) is nn.Sequential


def tell_at_the_end(device: str) -> None:
    model = network(device)
    optimizer = SVGD.released(model, 0.1, 0.01)
    pass_through(model, optimizer, batch(1, device))
    model[6].weight.grad[0, 0] = torch.inf
    optimizer.step()
    with pytest.warns(UserWarning, match=r"was not made: a NaN or infinite gradient at 6\.weight"):
        del optimizer
        gc.collect()
    optimizer = SVGD.released(model, 0.1, 0.01, nonfinite="skip")  # whom nobody has to tell
    pass_through(model, optimizer, batch(1, device) * torch.nan)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del optimizer
        gc.collect()


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


def let_go(device: str) -> None:
    """Nothing that a step was made of lives behind it for the optimizer's sake."""
    for make in (*READINGS.values(), lambda model: SVGD(model, 0.1, where=lambda site: False)):
        model = network(device)
        optimizer = make(model)
        for number in range(3):
            pass_through(model, optimizer, batch(number, device))
            gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            assert gradients
            assert not any(reference() is not None for reference in gradients)


def whatever_the_defaults(device: str) -> None:
    """Of torch: a step is counted in float32, and answered on the host."""
    for dtype in (torch.float64, torch.bfloat16):
        model = network(device)
        optimizer = SVGD.released(model, 0.1, 0.01)
        torch.set_default_dtype(dtype)
        try:
            for number in range(4):
                spoilt = number in {1, 3}
                if spoilt and optimizer._unwaited._guard is not None:
                    optimizer._unwaited._guard.step += 300  # more than bfloat16 can count
                optimizer.zero_grad()
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.nan if spoilt else 0.1)
                optimizer.step()
                if spoilt:
                    with pytest.raises(NonFiniteError, match="in the last step"):
                        optimizer.settle()
        finally:
            torch.set_default_dtype(torch.float32)
    model = network(device)
    optimizer = SVGD.released(model, 0.1, 0.01)
    pass_through(model, optimizer, batch(0, device) * torch.nan)
    with torch.device("meta" if device == "cpu" else device):
        optimizer.step()
    with pytest.raises(NonFiniteError, match="in the last step"):
        optimizer.settle()


def nothing_else_is_lost(device: str) -> None:
    """The step that is refused for the one before is made, if it is asked for again."""
    found = []
    for is_spoilt in (True, False):
        model = network(device).eval()
        optimizer = SVGD(model, 0.1, stale=True)
        if is_spoilt:
            pass_through(model, optimizer, batch(0, device))
            model[6].weight.grad[0, 0] = torch.inf
            optimizer.step()
        pass_through(model, optimizer, batch(1, device))
        if is_spoilt:
            with pytest.raises(NonFiniteError, match="in the last step"):
                optimizer.step()
        optimizer.step()
        found.append(kept(model, optimizer))
    assert all(map(torch.equal, *found))


def a_first_step_leaves_no_trace(device: str) -> None:
    model = network(device)
    optimizer = SVGD.released(model, 0.1, nonfinite="skip")
    pass_through(model, optimizer, batch(0, device) * torch.nan)
    optimizer.step()
    assert not optimizer.state_dict()["state"]


def names_are_those_of_then(device: str) -> None:
    model = network(device)
    optimizer = SVGD.released(model, 0.1, 0.01)
    pass_through(model, optimizer, batch(0, device))
    model[8].bias.grad[0] = torch.nan
    optimizer.step()
    for of_group in (optimizer.param_groups[0]["params"], optimizer.param_groups[0]["param_names"]):
        del of_group[0]
    with pytest.raises(NonFiniteError, match=r"at 8\.bias in the last step"):
        optimizer.settle()


def numbers_of_others(device: str) -> None:
    model = network(device)
    optimizer = SVGD(model, 0.1)
    optimizer.param_groups[0]["rho"] = numpy.float32(0.9)
    for number in range(3):
        pass_through(model, optimizer, batch(number, device))
        optimizer.step()
    assert optimizer._unwaited._last is not None


def a_failure_is_waited_for(device: str, monkeypatch: Any) -> None:
    """Of a step that fails on its way kernels may be left, which read what the next one writes."""
    model = network(device)
    optimizer = SVGD(model, 0.1)
    pass_through(model, optimizer, batch(0, device))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Guard, "update_means", lambda *_: exec("raise MemoryError"))
        optimizer.step()
    guard = optimizer._unwaited._guard
    assert guard is not None
    assert guard._is_pending
    guard.begin()
    assert not guard._is_pending
    pass_through(model, optimizer, batch(1, device))
    optimizer.step()
    optimizer.settle()


class InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * torch.inf


def a_trial_has_an_answer(device: str) -> None:
    """An infinite gradient, and then an infinite loss, before anybody was told of the first."""
    losses = iter(
        [
            lambda x: x.square().mean(),
            lambda x: InfiniteGradient.apply(x).square().mean(),  # type: ignore[no-untyped-call]
            lambda x: x.square().mean() * torch.inf,
        ]
    )
    batches = [(batch(number, device), torch.zeros(1, device=device)) for number in range(3)]
    tried = try_svgd(
        network(device), {"lr": 0.1, "scale": 0.01}, lambda x, _: next(losses)(x), batches
    )
    assert tried == math.inf


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


def look_at_the_review(device: str, monkeypatch: Any) -> None:
    whatever_the_defaults(device)
    nothing_else_is_lost(device)
    a_first_step_leaves_no_trace(device)
    names_are_those_of_then(device)
    numbers_of_others(device)
    a_failure_is_waited_for(device, monkeypatch)
    a_trial_has_an_answer(device)


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


def test_a_copy_has_nothing_to_tell() -> None:
    copy.deepcopy(SVGD(network("cpu"), 0.1)).settle()


@pytest.mark.parametrize("reading", READINGS)
def check_steps(reading, monkeypatch):
    compare("cpu", reading, monkeypatch)


@pytest.mark.parametrize("spoilt_by", [torch.nan, torch.inf])
@pytest.mark.parametrize("reading", ["Algorithm 1", "released", "momentum"])
def check_skipped(reading, spoilt_by):
    compare_skipped("cpu", reading, spoilt_by=spoilt_by)


def check_it_is_told():
    tell("cpu")
    tell_at_the_end("cpu")


def check_compiled(monkeypatch):
    compare_compiled("cpu", monkeypatch)
    refuse_a_second_pass("cpu")


def check_the_rest():
    leave_the_rest_to_others("cpu")
    let_go("cpu")


def check_what_came_up_in_a_review(monkeypatch):
    look_at_the_review("cpu", monkeypatch)


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
def test_it_is_told_on_a_gpu(device: str) -> None:
    tell(device)
    tell_at_the_end(device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_compiled_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_compiled(device, monkeypatch)
    refuse_a_second_pass(device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_the_rest_on_a_gpu(device: str) -> None:
    leave_the_rest_to_others(device)
    let_go(device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_what_came_up_in_a_review(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at_the_review(device, monkeypatch)


def test_a_cpu_is_not_waited_for() -> None:
    """Its answer is there at once, and so is the error."""
    model = network("cpu")
    optimizer = SVGD.released(model, 0.1, 0.01)
    pass_through(model, optimizer, batch(0, "cpu") * torch.nan)
    with pytest.raises(NonFiniteError, match="before this step"):
        optimizer.step()
