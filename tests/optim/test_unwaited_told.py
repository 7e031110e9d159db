"""Steps for which nobody waits: a NaN comes to light, and nothing else is lost or kept.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from typing import Any

import numpy
import pytest
import torch
from devices import ON_A_GPU
from interpreted import needs_triton, run_checks
from torch import Tensor, nn
from unwaited_steps import READINGS, batch, kept, network, pass_through

from virtualgrad import SVGD
from virtualgrad.errors import NonFiniteError
from virtualgrad.operators.guard import Guard
from virtualgrad.settings.trial import try_svgd


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


def the_choice_may_change(device: str) -> None:
    model = network(device)
    optimizer = SVGD.released(model, 0.1, 0.01)
    for choice in ("skip", "raise", "skip"):
        optimizer.nonfinite = choice
        pass_through(model, optimizer, batch(0, device) * torch.nan)
        optimizer.step()
        if choice == "raise":
            with pytest.raises(NonFiniteError, match="in the last step"):
                optimizer.settle()
        optimizer.settle()


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


def a_failure_is_waited_for(device: str) -> None:
    """Of a step that fails on its way kernels may be left, which read what the next one writes."""
    model = network(device)
    optimizer = SVGD(model, 0.1)
    pass_through(model, optimizer, batch(0, device))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
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


def test_a_copy_has_nothing_to_tell() -> None:
    copy.deepcopy(SVGD(network("cpu"), 0.1)).settle()


SCENES: dict[str, Any] = {
    scene.__name__: scene
    for scene in (
        tell,
        tell_at_the_end,
        let_go,
        whatever_the_defaults,
        nothing_else_is_lost,
        a_first_step_leaves_no_trace,
        the_choice_may_change,
        names_are_those_of_then,
        numbers_of_others,
        a_failure_is_waited_for,
        a_trial_has_an_answer,
    )
}


@pytest.mark.parametrize("scene", SCENES)
def check_scenes(scene):
    SCENES[scene]("cpu")


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("scene", SCENES)
def test_on_a_gpu(scene: str, device: str) -> None:
    SCENES[scene](device)


def test_a_cpu_is_not_waited_for() -> None:
    """Its answer is there at once, and so is the error."""
    model = network("cpu")
    optimizer = SVGD.released(model, 0.1, 0.01)
    pass_through(model, optimizer, batch(0, "cpu") * torch.nan)
    with pytest.raises(NonFiniteError, match="before this step"):
        optimizer.step()
