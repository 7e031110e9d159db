"""Passes mark parameters for their time; nobody else is to see more of it than a class."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modes import Counting
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD
from virtualgrad.errors import ModelError
from virtualgrad.virtual import watching
from virtualgrad.virtual.marks import Marked

BATCH, STEPS, CHANGED_AT = 6, 6, 3
Visit = Callable[["Visited"], None]
Change = Callable[["Visited", int], None]


class Visited(nn.Module):
    """Layers, and a parameter of its own; somebody comes by in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.rand(4))
        self.scale: Callable[[Tensor, Tensor], Tensor] = torch.mul
        self.visits: list[Visit] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for visit in self.visits:
            visit(self)
        return self.last(self.scale(x, self.gain)).exp()


def train(model: Visited, change: Change = lambda model, step: None) -> SVGD:
    """Train beside the reference, which reads the recorded graph; a change is made in both."""
    twin = Twin(model)
    optimizer = SVGD(model, LR, scale=SCALE)
    for step in range(STEPS):
        change(model, step)
        x = torch.randn(BATCH, 4).double()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        reference = twin.model(x).square().mean()
        torch.testing.assert_close(loss, reference)
        twin.backward(reference, BATCH)
        twin.optimizer.step()
    assert_trained_alike(model, twin.model)
    return optimizer


def are_marked(model: nn.Module) -> bool:
    """Whether all parameters of a model are, where the others are plain."""
    kinds = set(map(type, model.parameters()))
    assert len(kinds) == 1
    assert kinds == {nn.Parameter} or issubclass(next(iter(kinds)), Marked)
    return kinds != {nn.Parameter}


def test_they_are_on_for_the_time_of_a_pass() -> None:
    inside: list[bool] = []
    model = Visited()
    model.visits.append(lambda m: inside.append(are_marked(m)) if m is model else None)
    train(model)
    assert inside == [False] + [True] * (STEPS - 1)  # the first pass meets all ops
    assert not are_marked(model)


def test_an_error_takes_them_off() -> None:
    model = Visited()
    optimizer = train(model)

    def fail(visited: Visited) -> None:
        assert are_marked(visited)
        raise ValueError("a user's own")

    model.visits.append(fail)
    with pytest.raises(ValueError, match="a user's own"):
        model(torch.randn(BATCH, 4).double())
    assert not are_marked(model)
    optimizer.detach()


def saved(parameter: nn.Parameter) -> Any:
    memory = io.BytesIO()
    torch.save(parameter, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


COPIES: dict[str, Callable[[nn.Parameter], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda parameter: pickle.loads(pickle.dumps(parameter)),
    "torch.save": saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_that_time_are_plain(how: str) -> None:
    found: list[Any] = []
    model = Visited()
    model.first.weight.requires_grad_(False)
    model.visits.append(lambda m: found.extend(map(COPIES[how], (m.gain, m.first.weight))))
    train(model)
    assert len(found) > 2
    for gain, weight in zip(found[2::2], found[3::2], strict=True):  # behind the first pass
        assert type(gain) is type(weight) is nn.Parameter
        assert gain.requires_grad
        assert not weight.requires_grad
        assert torch.equal(weight, model.first.weight)
    assert torch.equal(copy.deepcopy(model.gain), model.gain)


def test_a_parameter_that_is_copied_twice_is_copied_once() -> None:
    found: list[Any] = []
    model = Visited()
    model.visits.append(lambda m: found.append(copy.deepcopy([m.gain, m.gain])))
    train(model)
    assert all(one is other for one, other in found)


def test_other_threads_run_ops_as_they_are() -> None:
    found: list[Tensor] = []

    def elsewhere(model: Visited) -> None:
        run = threading.Thread(target=lambda: found.append(model.gain.detach() * 2))
        run.start()
        run.join()

    model = Visited()
    model.visits.append(elsewhere)
    train(model)
    assert len(found) >= STEPS
    assert all(type(each) is Tensor for each in found)


class Logged(Tensor):
    """A tensor that is asked at its ops."""

    asked: list[Any] = []  # noqa: RUF012 - of the class

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_with_a_torch_function_bring_the_mode() -> None:
    """They come in a later pass than the first; from then on there are no marks."""

    def multiply(x: Tensor, gain: Tensor) -> Tensor:
        return (x.as_subclass(Logged) * gain).as_subclass(Tensor)

    def change(model: Visited, step: int) -> None:
        if step == CHANGED_AT:
            model.scale = multiply

    model = Visited()
    optimizer = train(model, change)
    assert Logged.asked
    model.visits.append(lambda m: inside.append(are_marked(m)))
    inside: list[bool] = []
    model(torch.randn(BATCH, 4).double())
    assert inside == [False]
    optimizer.detach()


def test_views_bring_the_mode_under_those_of_users() -> None:
    """From a view on, as if it had been there from the start; with the last view it goes."""
    counting = Counting()

    def scale(x: Tensor, gain: Tensor) -> Tensor:
        with counting:
            view = gain.view(2, 2)
            return x * view.reshape(4)

    model = Visited()
    model.scale = scale
    train(model)
    assert counting.seen.count(Tensor.view) >= STEPS
    assert torch._C._len_torch_function_stack() == 0


# ---------------------------------------------------------------- compilers that come late


def late_layer(model: Visited) -> None:
    model.last.compile(backend="eager")


def late_function(model: Visited) -> None:
    model.scale = torch.compile(lambda x, gain: x * gain, backend="eager")


def late_function_of_activations(model: Visited) -> None:
    same = torch.compile(lambda x: x.abs() * x.sign(), backend="eager")
    model.scale = lambda x, gain: same(x) * gain


LOOKS_AT_GRAD = pytest.mark.filterwarnings(  # torch.compile does, at activations
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
LATE = {
    "a layer": late_layer,
    "a function": late_function,
    "a function without parameters": late_function_of_activations,
}


@LOOKS_AT_GRAD
@pytest.mark.parametrize("at", [0, CHANGED_AT])
@pytest.mark.parametrize("which", LATE)
def test_compilers_may_come_to_any_pass(which: str, at: int) -> None:
    """A part of an eager model is compiled, early or late; from then on there are no marks."""
    inside: list[bool] = []

    def change(model: Visited, step: int) -> None:
        if step == at:
            LATE[which](model)

    model = Visited()
    optimizer = train(model, change)
    model.visits.append(lambda m: inside.append(are_marked(m)))
    model(torch.randn(BATCH, 4).double())
    assert inside == [False]
    optimizer.detach()


@LOOKS_AT_GRAD
def test_a_late_compilation_is_the_only_one() -> None:
    counter = CompileCounter()

    def change(model: Visited, step: int) -> None:
        if step == CHANGED_AT:
            model.scale = torch.compile(lambda x, gain: x * gain, backend=counter)

    train(Visited(), change)
    assert counter.frame_count == 1


@LOOKS_AT_GRAD
def test_a_compiler_that_tells_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while another thread compiles does not; it must not trace marks."""
    monkeypatch.setattr(watching, "_ask_compilers", lambda: None)
    handler = torch._dynamo.callback.callback_handler
    monkeypatch.setattr(handler, "start_callbacks", [])
    model = Visited()
    optimizer = train(model)
    late_layer(model)
    x = torch.randn(BATCH, 4).double()
    with pytest.raises(ModelError, match="later pass than the first"):
        model(x)
    assert not are_marked(model)
    model(x).sum().backward()  # as the message says: it knows of the compiled part now
    optimizer.step()


@LOOKS_AT_GRAD
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_that_is_run_as_it_was_traced_is_not_met_twice(backend: str) -> None:
    """With ``backend="eager"`` T acted on T(g): the mode around it was asked at the graph's ops."""

    def change(model: Visited, step: int) -> None:
        if step == 0:
            model.scale = torch.compile(lambda x, gain: x * gain, backend=backend)
            model.last.compile(backend=backend)

    train(Visited(), change)


def test_a_graph_of_the_users_own_is_met() -> None:
    """Of torch.fx, beside a function that is compiled."""

    def compiled(model: Any) -> None:
        model.same = torch.compile(lambda x: x * 1, backend="eager")

    class Traced(Visited):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.fx.symbolic_trace(nn.Sequential(self.first, nn.Tanh(), self.last))

        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = self.layers(self.same(x)).exp() * self.gain[:3]
            return scaled

        same = staticmethod(torch.clone)

    train(Traced().double(), lambda model, step: compiled(model) if step == CHANGED_AT else None)


# ---------------------------------------------------------------- what keeps what alive


def test_a_model_that_has_its_optimizer_goes_with_it() -> None:
    model = Visited()
    model.optimizer = train(model)  # type: ignore[assignment]
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
