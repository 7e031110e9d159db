"""Promise 1: a GradScaler changes nothing but the range of g; a skipped step leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from virtualgrad import SVGD, VirtualGradientDescent, errors
from virtualgrad.operators import Sign, compose
from virtualgrad.operators.rms import RMS

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {},
    "released": {"per_sample": False, "stale": True},
    "shared": {"share_positions": True},
}


class Network(nn.Module):
    """A convolution, a norm, a product, and a parameter without a sample axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4)
        self.scale, self.head = nn.Parameter(torch.rand(4)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        return self.head(x.flatten(1)) + (self.scale * 2).sum()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, 6, generator=generator) for _ in range(count)]


def plain_training(model: nn.Module, optimizer: Any, clip: float | None = None) -> None:
    for x in batches(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def scaled_training(
    model: nn.Module,
    optimizer: Any,
    scaler: GradScaler,
    *,
    run: Callable[..., Tensor] | None = None,
    clip: float | None = None,
) -> None:
    for x in batches(4):
        optimizer.zero_grad()
        scaler.scale((model if run is None else run)(x).square().mean()).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def new_scaler(**options: Any) -> GradScaler:
    # It doubles after every second step, so that a factor that is kept too long shows.
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **options)


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for (name, p), q in zip(first.named_parameters(), second.named_parameters(), strict=True):
        torch.testing.assert_close(p, q[1], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("reading", READINGS)
def test_a_known_scaler_changes_nothing(reading: str, clip: float | None) -> None:
    plain, scaled = Network(), Network()
    scaler = new_scaler()
    ours = SVGD(scaled, 0.01, grad_scaler=scaler, **READINGS[reading])
    theirs = SVGD(plain, 0.01, **READINGS[reading])
    plain_training(plain, theirs, clip)
    scaled_training(scaled, ours, scaler, clip=clip)
    assert_same(plain, scaled)
    for key, state in theirs.operator.state.items():
        torch.testing.assert_close(ours.operator.state[key]["r"], state["r"], rtol=1e-5, atol=0)


def test_an_unknown_scaler_is_learned_of_in_time() -> None:
    plain, scaled = Network(), Network()
    plain_training(plain, SVGD.released(plain, 0.01))
    scaled_training(scaled, SVGD.released(scaled, 0.01), new_scaler())
    assert_same(plain, scaled)


@pytest.mark.parametrize(
    ("options", "clip"), [({}, None), ({"stale": True}, 0.1)], ids=["needed it", "unscaled before"]
)
def test_an_unknown_scaler_that_comes_too_late_is_refused(
    options: dict[str, Any], clip: float | None
) -> None:
    model = Network()
    before = copy.deepcopy(model.state_dict())
    optimizer = SVGD(model, 0.01, **options)
    scaler = new_scaler()
    with pytest.raises(errors.ScaledLossError, match=r"grad_scaler=scaler"):
        scaled_training(model, optimizer, scaler, clip=clip)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert optimizer.operator.state == {}
    other = Network()  # and goes on as if nothing had been
    plain_training(model, optimizer)
    plain_training(other, SVGD(other, 0.01, **options))
    assert_same(other, model)


def test_a_scaler_that_is_told_later() -> None:
    plain, scaled = Network(), Network()
    optimizer = SVGD(scaled, 0.01)
    optimizer.grad_scaler = scaler = new_scaler()
    scaled_training(scaled, optimizer, scaler, clip=0.1)
    plain_training(plain, SVGD(plain, 0.01), clip=0.1)
    assert_same(plain, scaled)


def test_a_compiled_model() -> None:
    plain, scaled = Network(), Network()
    scaler = new_scaler()
    optimizer = SVGD(scaled, 0.01, grad_scaler=scaler)
    run = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    scaled_training(scaled, optimizer, scaler, run=run)
    plain_training(plain, SVGD(plain, 0.01))
    assert_same(plain, scaled)


@pytest.mark.parametrize("operator", [Sign, lambda: compose(Sign(0.1), RMS(stale=True))])
def test_any_operator_sees_the_loss_itself(operator: Callable[[], Any]) -> None:
    plain, scaled = Network(), Network()
    scaler = new_scaler()
    ours = VirtualGradientDescent(scaled, 0.01, operator(), grad_scaler=scaler)
    scaled_training(scaled, ours, scaler)
    plain_training(plain, VirtualGradientDescent(plain, 0.01, operator()))
    assert_same(plain, scaled)


def cleared_by_hand(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEAR: dict[str, Callable[[nn.Module, Any], None]] = {
    "by the next loop": lambda model, optimizer: None,
    "by the model": lambda model, optimizer: model.zero_grad(),
    "by the model, to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": cleared_by_hand,
}


@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("known", [True, False])
def test_a_skipped_step_leaves_no_trace(known: bool, clear: str) -> None:
    model = Network()
    scaler = new_scaler()
    optimizer = SVGD.released(model, 0.01, grad_scaler=scaler if known else None, momentum=0.5)
    scaled_training(model, optimizer, scaler)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    factor = scaler.get_scale()
    x = batches(1)[0]
    optimizer.zero_grad()
    scaler.scale(model(x * float("inf")).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == factor / 2
    torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], before[1]["state"], rtol=0, atol=0)
    CLEAR[clear](model, optimizer)
    if clear != "by the next loop":  # which would clear it by the optimizer
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        undisturbed = Network()
        undisturbed.load_state_dict(before[0])
        other = SVGD.released(undisturbed, 0.01, momentum=0.5)
        other.load_state_dict(before[1])
        undisturbed(x).square().mean().backward()
        other.step()
        assert_same(undisturbed, model)
        return
    twin = Network()
    twin.load_state_dict(before[0])
    second = SVGD.released(twin, 0.01, momentum=0.5)
    second.load_state_dict(before[1])
    plain_training(twin, second)
    scaled_training(model, optimizer, scaler)
    assert_same(twin, model)


def test_a_disabled_scaler_is_none() -> None:
    plain, scaled = Network(), Network()
    scaler = GradScaler("cpu", enabled=False)
    scaled_training(scaled, SVGD(scaled, 0.01, grad_scaler=scaler), scaler)
    plain_training(plain, SVGD(plain, 0.01))
    assert_same(plain, scaled)
