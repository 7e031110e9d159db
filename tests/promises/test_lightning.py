"""Lightning trains as a loop written by hand: automatic and manual, in every precision.

The module and the data are those of ``examples/lightning_module.py``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from lightning_module import Classifier, batches
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from virtualgrad import SVGD

pytestmark = [
    # Lightning 2.6.6 asks torch 2.13's pytree in the old way.
    pytest.mark.filterwarnings(
        "ignore:.isinstance.treespec, LeafSpec.:FutureWarning:lightning.pytorch.utilities._pytree"
    ),
    # A loader without workers is right for eight batches.
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning"),
]

EPOCHS = 2


def trainer(**options: Any) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{"max_epochs": EPOCHS, "accelerator": "cpu", **quiet, **options})


def classifier(kind: type[Classifier] = Classifier) -> Classifier:
    torch.manual_seed(0)
    return kind()


def by_hand(
    *,
    accumulate: int = 1,
    clip: Any = None,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    epochs: int = EPOCHS,
) -> Classifier:
    """The same training without Lightning."""
    model = classifier().to(dtype)
    optimizer = SVGD(model.network, model.lr, scale=model.scale)
    for _ in range(epochs):
        for number, (x, y) in enumerate(batches()):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model.network(x.to(dtype)), y)
            (loss / accumulate).backward()
            if (number + 1) % accumulate == 0:
                if clip is not None:
                    clip(model.parameters())
                optimizer.step()
                optimizer.zero_grad()
    optimizer.detach()
    return model


def new_scaler() -> GradScaler:
    """Its first factor overflows float16, so that steps are skipped until it is halved enough."""
    return GradScaler("cpu", init_scale=2.0**22, growth_interval=3)


def scaled_by_hand(*, accumulate: int, clip: Any, **options: Any) -> tuple[Classifier, GradScaler]:
    """The same training in float16 without Lightning."""
    model, scaler = classifier(), new_scaler()
    optimizer = SVGD(model, model.lr, scale=model.scale, grad_scaler=scaler, **options)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(batches()):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model.network(x), y)
            scaler.scale(loss / accumulate).backward()
            if (number + 1) % accumulate == 0:
                scaler.unscale_(optimizer)
                if clip is not None:
                    clip(model.parameters())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    optimizer.detach()
    return model, scaler


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    start = classifier()
    for name, parameter in model.named_parameters():
        reference = expected.get_parameter(name)
        assert parameter.dtype == reference.dtype
        torch.testing.assert_close(parameter, reference, rtol=1e-6, atol=1e-6, msg=name)
        assert (parameter - start.get_parameter(name)).abs().max() > 1e-4, f"{name} has not moved"


def in_double(self: Classifier, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
    x, y = batch
    return F.cross_entropy(self.network(x.to(self.dtype)), y)


@pytest.mark.parametrize(
    ("options", "hand"),
    [
        ({}, {}),
        ({"accumulate_grad_batches": 4}, {"accumulate": 4}),
        ({"gradient_clip_val": 0.05}, {"clip": lambda p: clip_grad_norm_(p, 0.05)}),
        (
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            {"clip": lambda p: clip_grad_value_(p, 0.01)},
        ),
        (
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
            {"accumulate": 2, "clip": lambda p: clip_grad_norm_(p, 0.05)},
        ),
    ],
    ids=["plain", "accumulation", "clipping by norm", "clipping by value", "both"],
)
def test_automatic_optimisation(options: dict[str, Any], hand: dict[str, Any]) -> None:
    model, expected = classifier(), by_hand(**hand)
    trainer(**options).fit(model, batches())
    assert_same(model, expected)
    if hand:  # the option does something
        assert not torch.allclose(by_hand().network[0].weight, expected.network[0].weight)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("precision", "hand"),
    [
        ("bf16-mixed", {"autocast": True}),
        ("bf16-true", {"dtype": torch.bfloat16}),
        ("64-true", {"dtype": torch.float64}),
    ],
)
def test_precision(precision: str, hand: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Classifier, "training_step", in_double)
    model = classifier()
    trainer(precision=precision).fit(model, batches())
    assert_same(model, by_hand(**hand))


class Scaled(Classifier):
    """Tells T of the scaler of Lightning's precision plugin."""

    options: dict[str, Any]

    def configure_optimizers(self) -> SVGD:
        scaler = self.trainer.precision_plugin.scaler
        return SVGD(self, self.lr, scale=self.scale, grad_scaler=scaler, **self.options)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("clipping", "clip"),
    [
        ({}, None),
        ({"gradient_clip_val": 0.05}, lambda p: clip_grad_norm_(p, 0.05)),
        (
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
            lambda p: clip_grad_value_(p, 0.01),
        ),
    ],
    ids=["plain", "clipping by norm", "clipping by value"],
)
@pytest.mark.parametrize("stale", [True, False])
def test_float16_with_a_scaler(clipping: dict[str, Any], clip: Any, stale: bool) -> None:
    """The plugin of ``precision="16-mixed"``, which Lightning itself offers on a GPU only."""
    options, accumulate = {"stale": stale, "eps": 1e-3}, 2 if stale else 1
    expected, by_hand_scaler = scaled_by_hand(accumulate=accumulate, clip=clip, **options)
    model, scaler = classifier(Scaled), new_scaler()
    model.options = options
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(plugins=[plugin], accumulate_grad_batches=accumulate, **clipping).fit(model, batches())
    assert_same(model, expected)
    assert scaler.state_dict() == by_hand_scaler.state_dict()
    assert scaler.get_scale() < 2.0**22  # steps were skipped


class Manual(Classifier):
    """Manual optimisation, two batches to a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, number) / 2)
        if (number + 1) % 2 == 0:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Classifier):
    """SVGD for the first layer, AdamW for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        first = SVGD(self, self.lr, scale=self.scale, params=self.network[0].parameters())
        return [first, torch.optim.AdamW(self.network[2].parameters(), 0.01)]

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, number))
        for optimizer in self.optimizers():
            optimizer.step()


def test_manual_optimisation() -> None:
    model = classifier(Manual)
    trainer().fit(model, batches())
    assert_same(model, by_hand(accumulate=2, clip=lambda p: clip_grad_norm_(p, 0.05)))


def test_two_optimizers() -> None:
    model, expected = classifier(TwoOptimizers), classifier()
    trainer().fit(model, batches())
    network = expected.network
    svgd = SVGD(network, expected.lr, scale=expected.scale, params=network[0].parameters())
    adamw = torch.optim.AdamW(network[2].parameters(), 0.01)
    for _ in range(EPOCHS):
        for x, y in batches():
            svgd.zero_grad()
            adamw.zero_grad()
            F.cross_entropy(network(x), y).backward()
            svgd.step()
            adamw.step()
    assert_same(model, expected)


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """Lightning saves the optimizer's state, r with it, and loads it before the first forward."""
    first, model = classifier(), classifier()
    interrupted = trainer(max_epochs=1)
    interrupted.fit(first, batches())
    interrupted.save_checkpoint(tmp_path / "half.ckpt")
    trainer().fit(model, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert_same(model, by_hand())
    without_r = copy.deepcopy(first)
    trainer(max_epochs=1).fit(without_r, batches())  # the weights alone are not enough
    assert not torch.allclose(without_r.network[0].weight, model.network[0].weight, atol=1e-4)


def test_the_example_is_a_plain_module_after_training() -> None:
    model = classifier()
    fitted = trainer()
    fitted.fit(model, batches())
    (optimizer,) = fitted.optimizers
    optimizer.detach()
    assert type(model) is Classifier
    assert [type(layer) for layer in model.network] == [nn.Linear, nn.ReLU, nn.Linear]
