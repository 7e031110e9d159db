"""Promise 1: autocast and models in bfloat16 and float16, with a GradScaler where it is needed.

The oracle is a twin in float64 on the whole batch (``tests/twin.py``). A number format with n bits
behind the point rounds by up to 2^-(n+1), half of its eps. The few roundings on the way from the
loss to a gradient are of either sign: what they leave of a tensor lies within a few eps of its
norm, and ``WITHIN`` eps are allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn
from torch.amp import GradScaler
from twin import Twin

from virtualgrad import SVGD

pytestmark = [
    pytest.mark.usefixtures("without_onednn"),
    # Torch instantiates a Function where it traces one.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

BATCH, LR, WITHIN = 32, 0.01, 4
TINY = 1e-4  # of the loss: in float16 its g has one digit left, unless it is scaled
HALVES = [torch.bfloat16, torch.float16]
READINGS: dict[str, dict[str, Any]] = {
    "algorithm 1": {"scale": 1e-3, "eps": 1e-12},
    "released": {"scale": 1e-2, "eps": 1e-12, "per_sample": False, "stale": True},
}
MICRO_BATCHES = {"algorithm 1": 1, "released": 4}  # with r updated first they are another method


class Network(nn.Module):
    """A convolution, a norm, a product, and a parameter without a sample axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.LayerNorm(16)
        self.scale, self.head = nn.Parameter(torch.rand(5)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.conv(x)).flatten(1))
        return self.head(x) + self.scale * 2


def batches(count: int, device: str) -> list[Tensor]:
    """Numbers that both formats hold exactly."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(BATCH, 3, 6, generator=generator).bfloat16().to(device) for _ in range(count)
    ]


def loss_of(output: Tensor, factor: float = 1.0) -> Tensor:
    return (output.double() - 1).square().mean() * factor


def assert_near(found: Tensor, exact: Tensor, half: torch.dtype, name: str) -> None:
    error = (found.double() - exact).norm() / exact.norm()
    assert error < WITHIN * torch.finfo(half).eps, f"{name}: {error:.2e}"


def compile_for(device: str, model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch.compile(model, fullgraph=True, backend=backend)


def autocast_step(
    run: Callable[..., Any],
    optimizer: SVGD,
    x: Tensor,
    half: torch.dtype,
    scaler: GradScaler,
    *,
    pieces: int,
) -> None:
    optimizer.zero_grad()
    for part in x.chunk(pieces):
        with torch.autocast(x.device.type, half):
            output = run(part.float())
        scaler.scale(loss_of(output, TINY) / pieces).backward()
    scaler.step(optimizer)
    scaler.update()


def twin_step(twin: Twin, x: Tensor) -> None:
    twin.backward(loss_of(twin.model(x.double()), TINY), len(x))
    twin.optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_autocast_is_the_large_batch_in_float64(
    half: torch.dtype, reading: str, compiled: bool, device: str
) -> None:
    """Float16 with a GradScaler, which skips a step in the middle; bfloat16 needs none."""
    model = Network().to(device)
    twin = Twin(copy.deepcopy(model).double(), LR, momentum=0.5, **READINGS[reading])
    start = copy.deepcopy(twin.model)
    scaler = GradScaler(device, init_scale=2.0**14, enabled=half == torch.float16)
    optimizer = SVGD(model, LR, momentum=0.5, grad_scaler=scaler, **READINGS[reading])
    run = compile_for(device, model) if compiled else model
    pieces = MICRO_BATCHES[reading]
    for number, x in enumerate(batches(4, device)):
        if number == 2 and scaler.is_enabled():
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
            scaler.update(2.0**40)
            autocast_step(run, optimizer, x, half, scaler, pieces=pieces)
            assert scaler.get_scale() == 2.0**39
            after = model.state_dict(), optimizer.state_dict()["state"]
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            scaler.update(2.0**14)
            continue
        autocast_step(run, optimizer, x, half, scaler, pieces=pieces)
        twin_step(twin, x)
    for name, parameter in model.named_parameters():
        begin = start.get_parameter(name)
        moved, exact = parameter.double() - begin, twin.model.get_parameter(name) - begin
        assert_near(moved, exact, half, name)
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    kept = [state["r"] for state in optimizer.operator.state.values()]
    assert len(kept) == 4 and all(r.dtype == torch.float32 for r in kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_model_in_half_precision(half: torch.dtype, stale: bool, device: str) -> None:
    """Virtual gradients are near the exact ones; the step is torch.optim.SGD's, bit by bit.

    The twin is brought to where the model is before each step: a parameter in half precision moves
    by whole units of its last place.
    """
    model = Network().to(device, half)
    plain = copy.deepcopy(model)  # takes our gradients
    twin = Twin(copy.deepcopy(model).double(), LR, scale=0.01, stale=stale)
    optimizer = SVGD(model, LR, scale=0.01, momentum=0.5, stale=stale)
    sgd = torch.optim.SGD(plain.parameters(), LR, momentum=0.5)
    for x in batches(3, device):
        twin.model.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        loss_of(model(x.to(half))).backward()
        twin.backward(loss_of(twin.model(x.double())), len(x))
        for (name, parameter), p in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None and parameter.grad.dtype == half
            exact = twin.model.get_parameter(name).grad
            assert exact is not None
            assert_near(parameter.grad, exact, half, name)
            p.grad = parameter.grad.clone()
        optimizer.step()
        sgd.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert {parameter.dtype for parameter in model.parameters()} == {half}
    assert {state["r"].dtype for state in optimizer.operator.state.values()} == {torch.float32}
    saved = optimizer.state_dict()
    again = copy.deepcopy(model)
    second = SVGD(again, LR, momentum=0.5, stale=stale)
    second.load_state_dict(saved)
    torch.testing.assert_close(second.state_dict()["state"], saved["state"], rtol=0, atol=0)


class TwoOutputs(nn.Module):
    """A sigma with a sample axis, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.place = nn.LayerNorm(3), nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), self.place * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_squares_are_summed_in_float32(half: torch.dtype, compiled: bool, device: str) -> None:
    """Of g that are given, so that r is known to the precision of float32.

    Squares of 1e-5 are zero in float16, and a sum in bfloat16 stands still after 256 terms.
    """
    torch.manual_seed(0)
    model = TwoOutputs().to(device, half)
    optimizer = SVGD(model, LR, per_sample=False)
    run = compile_for(device, model) if compiled else model
    outputs = run(torch.randn(4096, 3, device=device).to(half))
    g = [(torch.randn_like(output, dtype=torch.float32) * 1e-5).to(half) for output in outputs]
    torch.autograd.backward(outputs, g)
    optimizer.step()
    squares = {
        "norm:layer_norm(weight)": g[0].double().square().mean(0),
        "(model):mul(place)": g[1].double().square(),
    }
    assert optimizer.operator.state.keys() == squares.keys()
    for key, square in squares.items():
        r = optimizer.operator.state[key]["r"]
        assert r.dtype == torch.float32
        torch.testing.assert_close(r.double(), 0.1 * square, rtol=1e-5, atol=0, msg=key)
