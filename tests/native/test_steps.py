"""Whole steps in C++: to the bits of Python's, or left to Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from unwaited_steps import READINGS, batch, kept, network, pass_through

from virtualgrad import SVGD, native
from virtualgrad.errors import NonFiniteError
from virtualgrad.operators.finite import PLAIN
from virtualgrad.optim import native_steps
from virtualgrad.optim.unwaited import Unwaited

pytestmark = pytest.mark.usefixtures("in_cpp")

STEPS = 6
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LEFT_TO_PYTHON = {"momentum"}
ON_CPU, AGAIN = native_steps.step_on_cpu, Unwaited.step_again


def library() -> Any:
    return native.built()


class Steps:
    """Which steps C++ has made; or none of them, if it must not.

    Args:
        patch: of pytest.
        may: whether it may.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, may: bool = True) -> None:
        self.made: list[bool] = []
        self._may = may
        patch.setattr("virtualgrad.optim.descent.step_on_cpu", self._noting(ON_CPU))
        patch.setattr(Unwaited, "step_again", self._noting(AGAIN))

    def _noting(self, step: Callable[..., bool]) -> Callable[..., bool]:
        def noting(*args: Any, **options: Any) -> bool:
            done = self._may and step(*args, **options)
            if done:
                self.made.append(done)
            return done

        return noting


def trained(reading: str, device: str, *, may: bool) -> tuple[list[Tensor], int]:
    """What training leaves behind, and how many steps C++ has made."""
    model = network(device)
    optimizer = READINGS[reading](model)
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, may=may)
        for number in range(STEPS):
            pass_through(model, optimizer, batch(number, device))
            optimizer.step()
        return kept(model, optimizer), len(steps.made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reading", READINGS)
def test_training(reading: str, device: str) -> None:
    theirs, none = trained(reading, device, may=False)
    ours, made = trained(reading, device, may=True)
    assert none == 0
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    if reading in LEFT_TO_PYTHON:
        assert made == 0
    elif device == "cuda":
        assert made >= STEPS - 3  # layouts that come for the first time, and those of first steps
    else:
        assert made == STEPS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_step_that_is_refused(number: float, device: str) -> None:
    """It changes nothing, is told of as Python tells, and the next one is as if it had not been."""
    whole, model = network(device), network(device)
    theirs, ours = (READINGS["released"](each) for each in (whole, model))
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch)
        for place in range(4):
            for each, optimizer in ((whole, theirs), (model, ours)):
                pass_through(each, optimizer, batch(place, device))
                optimizer.step()
        before, made = kept(model, ours), len(steps.made)
        pass_through(model, ours, batch(4, device))
        model[6].weight.grad[1, 1] = number
        with pytest.raises(NonFiniteError, match=r"at 6\.weight"):
            ours.step()
            ours.settle()
        assert all(map(torch.equal, kept(model, ours), before))
        assert len(steps.made) == made + (device == "cuda")  # it skips the step itself
        for module, other in zip(whole.modules(), model.modules(), strict=True):
            for name, value in module.named_buffers(recurse=False):
                value.copy_(getattr(other, name))
        for each, optimizer in ((whole, theirs), (model, ours)):
            pass_through(each, optimizer, batch(5, device))
            optimizer.step()
    assert all(map(torch.equal, kept(model, ours), kept(whole, theirs)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_first_step_that_is_refused_leaves_no_trace(device: str) -> None:
    model = network(device)
    for _ in range(3):  # a layout that C++ knows by then
        optimizer = SVGD.released(model, 0.1, 0.01, nonfinite="skip")
        pass_through(model, optimizer, batch(0, device) * torch.nan)
        optimizer.step()
        pass_through(model, optimizer, batch(0, device) * torch.nan)
        optimizer.step()
        assert not optimizer.state_dict()["state"]
        optimizer.detach()


# ------------------------------------------------------------------------------------- one tensor


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Of all sizes, and however they lie in memory, each with a gradient."""
    sizes = [(), (1,), (0,), (7,), (16,), (33,), (1003,), (40, 50), (200, 300), (4, 6, 3, 3)]
    made = [torch.randn(size, dtype=dtype) for size in sizes]
    made += [torch.randn(30, 20).t(), torch.randn(6, 8)[:, ::2], torch.randn(2, 4, 5, 5)]
    made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
    found = [nn.Parameter(each) for each in made]
    for each in found:
        each.grad = torch.randn_like(each)
    found[7].grad = torch.randn(50, 40, dtype=dtype).t()
    found.append(nn.Parameter(torch.randn(3)))  # without a gradient
    return found


def group(params: list[nn.Parameter], **more: Any) -> dict[str, Any]:
    return {"params": params, "lr": 0.3, "momentum": 0, "weight_decay": 0.0, **more}


def step(*groups: dict[str, Any], looks: bool = True) -> bool:
    done: bool = library().step_on_cpu(list(groups), {}, PLAIN, looks)
    return done


@pytest.mark.parametrize("lr", [0.3, 1e-9, 2, 0.0, 0])
@pytest.mark.parametrize("looks", [True, False])
def test_descent_to_the_bits_of_torch(lr: float, looks: bool) -> None:
    assert library().adds_as_torch()
    params = parameters()
    expected = [each.detach().clone() for each in params]
    versions = [each._version for each in params]
    torch._foreach_add_(expected[:-1], [each.grad for each in params[:-1]], alpha=-lr)
    assert step(group(params, lr=lr), group([]), looks=looks)
    assert all(map(torch.equal, params, expected))
    signs = [(one.signbit(), other.signbit()) for one, other in zip(params, expected, strict=True)]
    assert all(torch.equal(*each) for each in signs)
    assert all(each._version > old for each, old in zip(params[:-1], versions, strict=False))
    assert params[-1]._version == versions[-1]


class Other(nn.Parameter):
    """A class of a user's, who may want to know what is done with it."""


def with_class(params: list[nn.Parameter]) -> dict[str, Any]:
    return group([*params, Other(torch.ones(3))])


def with_sparse(params: list[nn.Parameter]) -> dict[str, Any]:
    params[7].grad = torch.eye(40, 50).to_sparse()
    return group(params)


def with_overlap(params: list[nn.Parameter]) -> dict[str, Any]:
    memory = torch.randn(2001)
    params[6].data, params[6].grad = memory[:1003], memory[5:1008]
    return group(params)


def with_other_shape(params: list[nn.Parameter]) -> dict[str, Any]:
    params[7].grad = None
    params[7].grad = torch.ones(40, 50)
    params[7].data = torch.ones(40, 60)
    return group(params)


REFUSED: dict[str, Callable[[list[nn.Parameter]], dict[str, Any]]] = {
    "momentum": lambda params: group(params, momentum=0.9),
    "weight decay": lambda params: group(params, weight_decay=0.1),
    "a tensor for lr": lambda params: group(params, lr=torch.tensor(0.1)),
    "too large a number": lambda params: group(params, lr=1e39),
    "far too large a number": lambda params: group(params, lr=10**400),
    "a number of numpy's": lambda params: group(params, lr=numpy.float32(0.1)),
    "double": lambda params: group([*params, *parameters(torch.float64)]),
    "bfloat16": lambda params: group([*params, *parameters(torch.bfloat16)]),
    "another class": with_class,
    "sparse": with_sparse,
    "another shape": with_other_shape,
    "a gradient in the parameter's memory": with_overlap,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_python_is_not_touched(case: str) -> None:
    params = parameters()
    given = REFUSED[case](params)
    before = [each.detach().clone() for each in params]
    assert not step(group(params[:1]), given)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
@pytest.mark.parametrize("place", [0, 4, 8, 12])
def test_nothing_is_done_where_a_number_is_not_finite(place: int, number: float) -> None:
    params = parameters()
    grad = params[place].grad
    assert grad is not None
    grad[(-1,) * grad.dim()] = number
    before = [each.detach().clone() for each in params]
    assert not step(group(params))
    assert all(map(torch.equal, params, before))
    assert step(group(params), looks=False)  # as torch.optim does


def test_gradients_are_forgotten_as_torch_forgets_them() -> None:
    params = parameters()
    assert library().forget_gradients([group(params), group([])], PLAIN)
    assert all(each.grad is None for each in params)
    params = parameters()
    assert not library().forget_gradients([group(params), group([Other(torch.ones(3))])], PLAIN)
    assert all(each.grad is not None for each in params[:-1])
    with Functions():
        assert not library().forget_gradients([group(params)], PLAIN)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_grad(device: str) -> None:
    model = network(device)
    optimizer = SVGD.released(model, 0.1)
    pass_through(model, optimizer, batch(0, device))
    kept_by_user = model[8].weight.grad
    before = kept_by_user.clone()
    optimizer.zero_grad(set_to_none=False)
    assert all(each.grad.count_nonzero() == 0 for each in model.parameters())
    assert model[8].weight.grad is kept_by_user
    pass_through(model, optimizer, batch(0, device))
    kept_by_user = model[8].weight.grad
    with torch.profiler.profile() as profiler:
        optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(kept_by_user, before)
    names = {event.key for event in profiler.key_averages()}
    assert "Optimizer.zero_grad#SVGD.zero_grad" in names


class Ops(TorchDispatchMode):
    """Sees every op."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    """Sees every function of torch's."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **kwargs or {})


@pytest.mark.parametrize("mode", [Ops, Functions])
def test_who_watches_sees_all_of_it(mode: type[Any]) -> None:
    with mode():
        assert not step(group(parameters()))


def test_an_empty_batch_is_left_to_python() -> None:
    found = []
    for may in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = SVGD.released(model, 0.1)
        with pytest.MonkeyPatch.context() as patch:
            Steps(patch, may=may)
            for rows in (4, 0, 4):
                optimizer.zero_grad()
                model(torch.ones(rows, 3)).square().sum().backward()
                optimizer.step()
        found.append(kept(model, optimizer))
    assert all(map(torch.equal, *found))


def test_another_process_or_a_commit_of_ones_own() -> None:
    model = network("cpu")
    optimizer = SVGD.released(model, 0.1)
    assert optimizer.operator.plain_sites() == {}
    optimizer.operator.ranks = object()
    assert optimizer.operator.plain_sites() is None
    optimizer.operator.ranks = None
    for method in ("begin_reduction", "reduce", "commit", "witnesses", "counts"):
        for of in (type(optimizer.operator), optimizer.operator):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(of, method, lambda *_: None)
                assert optimizer.operator.plain_sites() is None
    assert optimizer.operator.plain_sites() is not None


def test_groups_in_a_tuple() -> None:
    model = network("cpu")
    optimizer = SVGD.released(model, 0.1)
    optimizer.param_groups = tuple(optimizer.param_groups)
    pass_through(model, optimizer, batch(0, "cpu"))
    optimizer.step()
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())


# ------------------------------------------------------------------------- layouts that come again


def trained_compiled(device: str, *, may: bool) -> tuple[list[Tensor], int]:
    torch._dynamo.reset()
    model = network(device)
    optimizer = SVGD(model, 0.1, nonfinite="skip")
    run = torch.compile(model, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, may=may)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = run(batch(number, device)).square().mean()
            (loss * torch.nan if number == STEPS - 2 else loss).backward()
            optimizer.step()
        return kept(model, optimizer), len(steps.made)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_training(device: str) -> None:
    """Compiled passes write the new r; a step that is refused has its candidates back."""
    ours, made = trained_compiled(device, may=True)
    theirs, none = trained_compiled(device, may=False)
    assert all(map(torch.equal, ours, theirs))
    assert made >= STEPS - 3
    assert none == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("few", [None, -1])
def test_layouts_in_turns_on_a_gpu(few: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradients that are not always there, and learning rates that change; small and large."""
    if few is not None:
        monkeypatch.setattr("virtualgrad.operators.addresses.FEW", few)
    found, counts = [], []
    for may in (True, False):
        model = network("cuda")
        optimizer = SVGD.released(model, 0.1, 0.01)
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch, may=may)
            for number in range(16):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
                optimizer.param_groups[0]["scale"] = 0.01 * (1 + number % 3)
                pass_through(model, optimizer, batch(number, "cuda"))
                if number % 2:
                    model[8].bias.grad = None
                optimizer.step()
        found.append(kept(model, optimizer))
        counts.append(len(steps.made))
    assert all(map(torch.equal, *found))
    assert counts[0] >= 10
    assert counts[1] == 0
