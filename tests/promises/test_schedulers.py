"""Every scheduler of torch.optim drives SVGD as it drives SGD; so does SWALR."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer, lr_scheduler, swa_utils
from twin import LR, SCALE, Twin, assert_trained_alike

from virtualgrad import SVGD

STEPS, MOMENTUM = 8, 0.9

SCHEDULERS: dict[str, Callable[[Optimizer], object]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, power=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),  # momentum, too
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),  # and here
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=2), lr_scheduler.StepLR(o, 1)], [3]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def test_no_scheduler_of_torch_is_missing() -> None:
    of_torch = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert of_torch - SCHEDULERS.keys() == set()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    start, twin = copy.deepcopy(model), Twin(model, momentum=MOMENTUM)
    optimizer = SVGD(model, LR, scale=SCALE, momentum=MOMENTUM)
    scheduler, of_twin = SCHEDULERS[name](optimizer), SCHEDULERS[name](twin.optimizer)
    rates = set()
    for step in range(STEPS):
        x, y = torch.randn(6, 4).double(), torch.randint(0, 3, (6,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        twin.backward(F.cross_entropy(twin.model(x), y), batch_size=6)
        twin.optimizer.step()
        rates.add(optimizer.param_groups[0]["lr"])
        for each in (scheduler, of_twin):
            # A plateau that is the same for both: the metric only ever gets worse.
            each.step(*((float(step),) if name == "ReduceLROnPlateau" else ()))
        assert optimizer.param_groups[0]["lr"] == twin.optimizer.param_groups[0]["lr"]
    assert len(rates) > 1  # it did change the rate
    assert_trained_alike(model, twin.model, start)


def test_scheduler_and_optimizer_resume_together() -> None:
    def trained(steps: range, resume_from: dict | None = None) -> tuple[nn.Module, dict]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        optimizer = SVGD(model, LR, momentum=MOMENTUM)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        if resume_from is not None:
            model.load_state_dict(resume_from["model"])
            optimizer.load_state_dict(resume_from["optimizer"])
            scheduler.load_state_dict(resume_from["scheduler"])
        for step in steps:
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).double()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return model, {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    whole, _ = trained(range(STEPS))
    _, middle = trained(range(3))
    resumed, _ = trained(range(3, STEPS), resume_from=middle)
    assert torch.equal(whole.weight, resumed.weight)
