r"""The range test: the loss while the learning rate grows, for several scales.

On a copy of the model, at step k = 0 ... N - 1,

    lr_k = lr_min (lr_max / lr_min)^(k / (N - 1)),

until the loss blows up. Where it falls, a rate is large enough to learn; where it turns up, too
large. (Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, for one rate; here once
for each scale.) The smoothed loss is a running mean without the bias of its start,

    a_k = beta a_(k-1) + (1 - beta) J_k,        smoothed_k = a_k / (1 - beta^(k + 1)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from virtualgrad.errors import HyperparameterError, NonFiniteError
from virtualgrad.optim import SVGD
from virtualgrad.settings.batches import (
    LossFunction,
    copied,
    loss_of,
    plain_model,
    random_numbers_kept,
    take,
)
from virtualgrad.settings.ranges import RangeCurve, RangeTest


def range_test(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    scales: Sequence[float] = (0.001, 0.01, 0.1),
    lr_min: float = 1e-4,
    lr_max: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.9,
    blow_up: float = 4.0,
    **options: Any,
) -> RangeTest:
    """Find the range of learning rates that train a model with SVGD, for each of some scales.

    Every scale begins with a copy of the model as it is, and sees the same batches. The model and
    the random numbers stay as they are.

    Args:
        model: the model.
        loss_fn: ``loss_fn(model(x), y)`` where a batch is a pair (x, y); ``loss_fn(model, batch)``
            for batches of any other kind.
        batches: batches as in training, such as a DataLoader; they begin anew when they end.
        scales: s, one curve each.
        lr_min: the first alpha.
        lr_max: the last alpha.
        steps: N, the steps from the first to the last.
        smoothing: beta; 0 for none.
        blow_up: a curve ends where the smoothed loss is so many times the lowest before, or is not
            finite. Pass ``math.inf`` for losses that may be negative.
        options: further options of :meth:`virtualgrad.SVGD.released`, such as ``weight_decay``.
    """
    _require_ramp(
        scales=scales,
        lr_min=lr_min,
        lr_max=lr_max,
        steps=steps,
        smoothing=smoothing,
        blow_up=blow_up,
    )
    original = plain_model(model)
    rates = [lr_min * (lr_max / lr_min) ** (k / (steps - 1)) for k in range(steps)]
    if isinstance(batches, Iterator):  # it comes by once: keep what is needed of it
        with random_numbers_kept(original):
            batches = take(batches, steps)
    curves = []
    for scale in scales:
        with random_numbers_kept(original):
            curves.append(
                _curve(
                    copied(original), loss_fn, _endless(batches), rates, scale,
                    smoothing=smoothing, blow_up=blow_up, options=options,
                )
            )  # fmt: skip
    return RangeTest(tuple(curves))


def _curve(
    twin: nn.Module,
    loss_fn: LossFunction,
    batches: Iterator[Any],
    rates: Sequence[float],
    scale: float,
    *,
    smoothing: float,
    blow_up: float,
    options: dict[str, Any],
) -> RangeCurve:
    lrs: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    diverged, mean = False, 0.0
    with SVGD.released(twin, rates[0], scale, **options) as optimizer, torch.enable_grad():
        for k, (lr, batch) in enumerate(zip(rates, batches, strict=False)):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            try:
                loss = loss_of(twin, loss_fn, batch)
                loss.backward()
                optimizer.step()
                optimizer.settle()
            except NonFiniteError:
                if not losses:
                    raise  # it was so before the first step: not the rate's doing
                diverged = True
                break
            mean = smoothing * mean + (1 - smoothing) * loss.item()
            lrs.append(lr)
            losses.append(loss.item())
            smoothed.append(mean / (1 - smoothing ** (k + 1)))
            if smoothed[-1] > blow_up * min(smoothed):
                diverged = True
                break
    return RangeCurve(scale, tuple(lrs), tuple(losses), tuple(smoothed), diverged)


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches again and again; an error if there are none."""
    while True:
        again = iter(batches)
        yield from chain(take(islice(again, 1), 1), again)


def _require_ramp(
    *,
    scales: Sequence[float],
    lr_min: float,
    lr_max: float,
    steps: int,
    smoothing: float,
    blow_up: float,
) -> None:
    wrong = (
        (not scales, "no scales", "at least one scale", "pass scales=(0.001, 0.01, 0.1)"),
        (
            not 0 < lr_min < lr_max < math.inf,
            f"lr_min={lr_min!r}, lr_max={lr_max!r}",
            "0 < lr_min < lr_max, finite",
            "leave them out for 1e-4 to 10",
        ),
        (steps < 2, f"steps={steps!r}", "at least two", "choose 50 to 200"),
        (
            not 0 <= smoothing < 1,
            f"smoothing={smoothing!r}",
            "0 <= smoothing < 1",
            "choose 0 for none, or 0.9",
        ),
        (not blow_up > 1, f"blow_up={blow_up!r}", "a factor above 1", "leave it out for 4"),
    )
    for is_wrong, given, allowed, todo in wrong:
        if is_wrong:
            raise HyperparameterError.of(given=given, allowed=allowed, todo=todo)
