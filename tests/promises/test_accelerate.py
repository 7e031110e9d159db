"""Accelerate trains as a loop written by hand.

The model, the data and the loop are those of ``examples/hf_accelerate.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from hf_accelerate import batches, network, train
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from virtualgrad import SVGD

EPOCHS, LR, SCALE = 2, 0.05, 0.1  # the rates of the example
NO_CLIPPING = torch.inf  # to a norm it would hide a wrong scale


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Accelerator]]:
    """Make an accelerator; what accelerate keeps for the whole process is forgotten afterwards."""

    def make(**options: Any) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **options)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return network()


def by_hand(
    *, accumulate: int = 1, max_norm: float = torch.inf, autocast: bool = False
) -> nn.Module:
    """The same training without accelerate."""
    trained = model()
    optimizer = SVGD(trained, LR, scale=SCALE)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(batches()):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = trained(x)
            (F.cross_entropy(output.float(), y) / accumulate).backward()
            if (number + 1) % accumulate == 0:
                clip_grad_norm_(trained.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    optimizer.detach()
    return trained


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    start = model()
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(
            parameter, expected.get_parameter(name), rtol=1e-6, atol=1e-6, msg=name
        )
        moved = (parameter - start.get_parameter(name)).abs().max()
        assert moved > 1e-4, f"{name} has not moved"


def test_training(accelerator: Callable[..., Accelerator]) -> None:
    trained = model()
    train(accelerator(), trained, EPOCHS, NO_CLIPPING)
    assert_same(trained, by_hand())


def test_accumulation(accelerator: Callable[..., Accelerator]) -> None:
    trained, expected = model(), by_hand(accumulate=4)
    train(accelerator(gradient_accumulation_steps=4), trained, EPOCHS, NO_CLIPPING)
    assert_same(trained, expected)
    assert not torch.allclose(by_hand()[0].weight, expected[0].weight)


def test_clipping(accelerator: Callable[..., Accelerator]) -> None:
    trained, expected = model(), by_hand(max_norm=0.1)
    train(accelerator(), trained, EPOCHS, max_norm=0.1)
    assert_same(trained, expected)
    assert not torch.allclose(by_hand()[0].weight, expected[0].weight)


@pytest.mark.usefixtures("without_onednn")
def test_bfloat16(accelerator: Callable[..., Accelerator]) -> None:
    trained, expected = model(), by_hand(autocast=True)
    train(accelerator(mixed_precision="bf16"), trained, EPOCHS, NO_CLIPPING)
    assert_same(trained, expected)
    assert not torch.allclose(by_hand()[0].weight, expected[0].weight, rtol=0, atol=1e-6)


def test_a_scaler(accelerator: Callable[..., Accelerator]) -> None:
    """What ``mixed_precision="fp16"`` does, which accelerate offers on a GPU only.

    T is told of ``accelerator.scaler``; a step that it skips is one for accelerate, too.
    """
    made, trained, expected = accelerator(), model(), by_hand(max_norm=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    svgd = SVGD(trained, LR, scale=SCALE)
    svgd.grad_scaler = scaler  # as for an optimizer that was there before the accelerator
    optimizer = AcceleratedOptimizer(svgd, device_placement=False, scaler=scaler)
    made._optimizers, made.scaler, made.native_amp = [optimizer], scaler, True
    made.state._mixed_precision = "fp16"  # has clip_grad_norm_ unscale them
    for epoch in range(EPOCHS):
        for number, (x, y) in enumerate(batches()):
            overflows = (epoch, number) == (1, 2)
            for factor in (float("inf"), 1.0) if overflows else (1.0,):
                made.backward(F.cross_entropy(trained(x), y) * factor)
                made.clip_grad_norm_(trained.parameters(), 0.1)
                optimizer.step()
                assert optimizer.step_was_skipped == (factor != 1.0)
                optimizer.zero_grad()
    assert_same(trained, expected)


def test_an_optimizer_made_after_the_model_was_prepared(
    accelerator: Callable[..., Accelerator],
) -> None:
    trained = model()
    made = accelerator()
    train(made, made.prepare(trained), EPOCHS, NO_CLIPPING)
    assert_same(trained, by_hand())


def test_a_run_that_was_interrupted_goes_on(
    accelerator: Callable[..., Accelerator], tmp_path: Path
) -> None:
    def epochs(first: int, last: int, load: bool) -> nn.Module:
        trained, made = model(), accelerator()
        prepared, optimizer, loader = made.prepare(
            trained, SVGD(trained, LR, scale=SCALE), batches()
        )
        if load:
            made.load_state(str(tmp_path))
        for _ in range(first, last):
            for x, y in loader:
                made.backward(F.cross_entropy(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()
        if not load:
            made.save_state(str(tmp_path))
        return trained

    epochs(0, 1, load=False)
    assert_same(epochs(1, 2, load=True), by_hand())


class Gated(nn.Module):
    """A raw parameter in the forward of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 4)
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gate


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("keep_fp32_wrapper", [True, False])
def test_unwrapping_the_model_for_a_checkpoint_changes_nothing(
    accelerator: Callable[..., Accelerator], keep_fp32_wrapper: bool
) -> None:
    trained, made = Gated(), accelerator(mixed_precision="bf16")
    prepared, optimizer = made.prepare(trained, SVGD(trained, LR))
    made.unwrap_model(prepared, keep_fp32_wrapper=keep_fp32_wrapper)
    x, y = next(iter(batches()))
    F.cross_entropy(prepared(x).float(), y).backward()
    optimizer.step()
    assert set(optimizer.optimizer.operator.state) == {"layer:linear(weight)", "(model):mul(gate)"}
