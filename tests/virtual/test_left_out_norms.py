"""Norms that T leaves out, in compiled passes: they run as they are, and nothing looks at them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretending import pretend_to_compile
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from virtualgrad import SVGD, weights_only
from virtualgrad.compiling import settled_while_tracing
from virtualgrad.virtual.plans import Plans


class OwnNorm(nn.LayerNorm):
    """Another class: what its forward does, nobody knows."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    norms = (nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8))
    layers = [layer for norm in norms for layer in (norm, nn.Tanh(), nn.Linear(8, 8))]
    return nn.Sequential(nn.Linear(5, 8), *layers).double()


def trained(model: nn.Module, run: Any) -> list[Tensor]:
    """Gradients and buffers of two steps."""
    torch.manual_seed(1)
    optimizer = SVGD.released(model, 1e-2)
    found: list[Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        run(torch.randn(6, 5, dtype=torch.float64)).pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(buffer.clone() for buffer in model.buffers())]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops of the sites that were looked at."""
    ops: list[str] = []
    find = Plans.of

    @settled_while_tracing
    def note(op: str) -> None:
        ops.append(op)

    def noted(self: Plans, call: Any, *rest: Any) -> Any:
        note(call.rule.op)
        return find(self, call, *rest)

    monkeypatch.setattr(Plans, "of", noted)
    return ops


def test_compiled_as_in_eager_passes(looked_at: list[str]) -> None:
    model = network()
    expected = trained(eager := copy.deepcopy(model), eager)
    looked_at.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = trained(model, compiled)
    torch._dynamo.reset()
    assert looked_at == ["linear"] * 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def test_nothing_looks_at_them(looked_at: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    pretend_to_compile(monkeypatch)
    trained(model, model)
    assert set(looked_at) == {"linear"}


def test_another_mode_sees_their_ops(looked_at: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model = network()
    pretend_to_compile(monkeypatch)
    with Sees():
        trained(model, model)
    assert F.layer_norm in seen
    assert "layer_norm" in looked_at


def test_only_norms_of_torch_that_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.LayerNorm(4), OwnNorm(4), nn.Linear(4, 4), weight_norm(nn.LayerNorm(4)), nn.LayerNorm(4)
    )
    model[4].forward = lambda x: x  # type: ignore[method-assign]
    optimizer = SVGD(model, 0.1, where=weights_only)
    attachment = optimizer._attachment
    assert attachment is not None
    told = [attachment.tell(id(layer), "") for layer in model]
    assert [each and each[1] for each in told] == ["left out", "", "", "", ""]
    monkeypatch.setattr(F, "layer_norm", lambda *args: args[0])
    assert attachment.tell(id(model[0]), "") == ("0", "", "")


@pytest.mark.parametrize("where", [None, lambda site: site.op == "linear"])
def test_only_where_all_norms_are_left_out(where: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = SVGD(model, 0.1, where=where)
    attachment = optimizer._attachment
    assert attachment is not None
    assert attachment.tell(id(model[1]), "") == ("1", "", "")


def insert(model: nn.Sequential) -> None:
    model.insert(0, nn.Identity())


def remove(model: nn.Sequential) -> None:
    del model[2]


def wrap(model: nn.Sequential) -> None:
    model[1] = nn.Sequential(model[1])


@pytest.mark.parametrize("change", [insert, remove, wrap])
def test_modules_that_have_moved_since(change: Any, looked_at: list[str]) -> None:
    """Layers are known by themselves, and not by a path at which there may be another by now."""

    def gradients(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4)).double()
        optimizer = SVGD.released(model, 1e-2)
        change(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()  # type: ignore[operator]
        optimizer.detach()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(False)
    looked_at.clear()
    found = gradients(True)
    torch._dynamo.reset()
    assert looked_at == ["linear"] * 2
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def test_a_norm_by_itself_under_another_mode() -> None:
    """No pass of the model: what the other mode does to its ops is done."""

    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            return found * 2 if func is F.layer_norm else found

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = SVGD.released(model, 0.1)
    mode, x = Doubles(), torch.randn(3, 4)

    def run(x: Tensor) -> Tensor:
        with mode:
            found: Tensor = model[1](x)
        return found

    expected = run(x)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()
    optimizer.detach()
