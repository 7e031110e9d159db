r"""Settings of SVGD from a working optimizer, by the paper's two rules and by equal steps.

SVGD (as released) steps by lr * gradient where no T acts (biases, norms), and by lr * scale * V
where it acts (V: the pull-back of T(g) with s = 1). Two numbers, two kinds of parameters:

* **lr.** Of SGD it is the rate itself (the paper's first rule), which gives every parameter
  without a T its old step. Of an adaptive optimizer it is what gives such parameters their old step
  in the median: lr = median of |step| / |gradient|.
* **scale, by the rule.** scale * lr = rate of RMSProp (the second rule). Of SGD alone that rate is
  not known, and 0.002 stands for it: see :data:`virtualgrad.optim.svgd.SCALE_TIMES_LR`.
* **scale, by equal steps.** scale = median over weights of |step| / (lr |V|): the weight in the
  middle steps as far as before.

Where r << eps, T(g) is g s / sqrt(eps): SVGD is SGD with the rate lr s / sqrt(eps) there, and the
second rule has lost its reason (T(g) no longer has the size s). So both are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from torch import nn
from torch.optim import Optimizer

from virtualgrad.optim.svgd import SCALE_TIMES_LR
from virtualgrad.settings.batches import (
    LossFunction,
    copied,
    plain_model,
    random_numbers_kept,
    take,
)
from virtualgrad.settings.current import Current, read_current
from virtualgrad.settings.measure import EPS, Size, measure
from virtualgrad.settings.suggestion import Suggestion, Trials
from virtualgrad.settings.trial import loss_before, try_current, try_svgd
from virtualgrad.virtual import named_parameters

RATIO = 100.0
"""Rate of SGD over that of RMSProp in all three of the paper's tables."""
DIGITS = (3, 7)
"""How many digits of a loss are written: the first number, or up to the second (float32 holds no
more) where it takes them to tell two losses apart."""


def suggest(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    current: Optimizer,
    count: int = 8,
) -> Suggestion:
    """Settings of SVGD for a model that another optimizer trains well, checked on a few batches.

    The model, its buffers and gradients, the current optimizer and the random numbers stay as they
    are; what is tried, is tried on copies. An attached model is measured as a plain one.

    Args:
        model: the model, at its initial weights or anywhere in its training.
        loss_fn: ``loss_fn(model(x), y)``, such as ``F.cross_entropy``, where a batch is a pair
            (x, y); ``loss_fn(model, batch)`` for batches of any other kind.
        batches: batches as in training, such as a DataLoader; the first few are used.
        current: a torch.optim SGD, RMSprop, Adam or AdamW with settings that work.
        count: how many batches to use at most.

    Returns:
        lr, scale, the reasons, a table of sizes for each parameter, and the losses of the trials.
    """
    original = plain_model(model)
    parameters = named_parameters(original)
    read = read_current(current, parameters)
    with random_numbers_kept(original):
        few = take(batches, count)
        sizes = measure(copied(original), loss_fn, few, read)
        lr = _lr(read, sizes)
        decay = 0.0 if read.decay is None else _rounded(read.decay / lr)
        rule, equal = _rule(read, lr), _equal_steps(lr, sizes)
        before = loss_before(copied(original), loss_fn, few)
        now = try_current(original, current, loss_fn, few)

        def attempt(scale: float) -> float:
            settings = {"lr": lr, "scale": scale, "weight_decay": decay}
            return try_svgd(original, settings, loss_fn, few)

        tried = {scale: attempt(scale) for scale in dict.fromkeys((rule, equal))}
        if min(tried.values()) > max(before, now):
            bounded = math.sqrt(EPS)  # |T(g)| <= |g|: no step is longer than SGD's
            tried[bounded] = attempt(bounded)
    scale = min(tried, key=lambda one: tried[one])
    trials = Trials(before, now, tried[scale], tried)
    reasons = (
        _why_lr(read, lr, sizes),
        _why_scale(read, rule, equal, trials),
        *_on_linearity(scale, sizes),
        _verdict(read, trials),
        *read.notes,
    )
    return Suggestion(lr, scale, decay, reasons, tuple(sizes), trials, len(few), read.title)


def _lr(current: Current, sizes: Sequence[Size]) -> float:
    """SGD's own rate; else that which gives parameters without a T their old step."""
    if not current.adaptive:
        return current.rate
    plain = [size.step / size.gradient for size in sizes if size.virtual is None]
    return _rounded(median(plain) if plain else RATIO * current.rate)


def _rule(current: Current, lr: float) -> float:
    """The scale of the paper's second rule: scale * lr is the rate of RMSProp."""
    return _rounded((current.rate if current.adaptive else SCALE_TIMES_LR) / lr)


def _equal_steps(lr: float, sizes: Sequence[Size]) -> float:
    """The scale at which the weight in the middle steps as far as before."""
    return _rounded(median(size.step / (lr * size.virtual) for size in sizes if size.virtual))


def _rounded(value: float) -> float:
    """Two digits: the rest is noise."""
    return float(f"{value:.2g}")


def _why_lr(current: Current, lr: float, sizes: Sequence[Size]) -> str:
    if current.adaptive and any(size.virtual is None for size in sizes):
        return (
            f"lr {lr:g}: with it, parameters without a T (biases, norms) step as far as with "
            f"{current.title}, in the median."
        )
    if current.adaptive:
        return (
            f"lr {lr:g}: {RATIO:g} times {current.title}'s. T acts on every parameter, so only "
            "scale * lr matters."
        )
    if current.rate != current.lr:
        return (
            f"lr {lr:g}: what SGD's {current.lr:g} comes to with its momentum, lr / (1 - momentum)."
        )
    return f"lr {lr:g}: that of SGD, so that parameters without a T (biases, norms) step as before."


def _why_scale(current: Current, rule: float, equal: float, trials: Trials) -> str:
    rate = f"{current.title}'s {current.rate:g}" if current.adaptive else f"{SCALE_TIMES_LR:g}"
    text = (
        f"scale: {rule:g} by the rule scale * lr = {rate}; {equal:g} for steps as long as now in "
        "the median weight."
    )
    if rule == equal:
        return f"{text} They agree."
    digits = _digits(trials)
    tried = ", ".join(f"{loss:.{digits}g} with {scale:g}" for scale, loss in trials.tried.items())
    return f"{text} Tried on copies: loss {tried}."


def _on_linearity(scale: float, sizes: Sequence[Size]) -> list[str]:
    """Where T only multiplies, a reader should know by how much."""
    shares = [size.linear for size in sizes if size.linear is not None]
    linear = sum(share > 0.5 for share in shares)
    if not linear:
        return []
    return [
        f"At {linear} of {len(shares)} weights r is mostly below eps: T nearly multiplies the "
        f"gradient by scale / sqrt(eps) = {scale / math.sqrt(EPS):.3g} there, as another learning "
        "rate would."
    ]


def _digits(trials: Trials) -> int:
    """How many digits tell the losses apart, the same for all of them."""
    losses = (trials.before, trials.current, *trials.tried.values())
    few, most = DIGITS

    def different(digits: int) -> int:
        return len({f"{loss:.{digits}g}" for loss in losses})

    return next(digits for digits in range(few, most + 1) if different(digits) == different(most))


def _verdict(current: Current, trials: Trials) -> str:
    digits = _digits(trials)
    before, now, svgd = (
        f"{loss:.{digits}g}" for loss in (trials.before, trials.current, trials.svgd)
    )
    text = (
        f"Loss on these batches: {before} before; after one step on each {now} with "
        f"{current.title}, {svgd} with SVGD."
    )
    if trials.svgd <= trials.current or svgd == now:
        return f"{text} Go ahead."
    if trials.svgd <= trials.before:
        return f"{text} It learns, less quickly so far: look at range_test."
    return f"{text} The loss rises: use a smaller lr or a warm-up, and look at range_test."
