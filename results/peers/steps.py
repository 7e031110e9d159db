"""How a step is run: one probe per feature, asked with the name of a library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from libraries import (
    BATCH,
    MLP,
    NO,
    NO_OPTIMIZER,
    PARTIAL,
    SAMPLERS,
    SINGD,
    YES,
    BackPACK,
    Opacus,
    Verdict,
    data,
    difference,
    moved,
    opacus_train,
    oracle,
    per_sample,
    plain_step,
    same_as_plain,
    train,
    verdict,
)
from torch import Tensor, nn


def compile(library: str) -> Verdict:
    def compiled(model: Any, fullgraph: bool) -> Any:
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager", fullgraph=fullgraph)

    def attempt(fullgraph: bool) -> str:
        try:
            if library != "singd":
                return per_sample(
                    SAMPLERS[library], MLP(), wrap=lambda model: compiled(model, fullgraph)
                )

            def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
                optimizer.zero_grad()
                F.cross_entropy(compiled(model, fullgraph)(x), y).backward()
                optimizer.step()

            return same_as_plain(step)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0]}"[:120]

    whole, broken = attempt(True), attempt(False)
    if not whole:
        return YES, "as without it"
    parts = broken or "right"
    return (PARTIAL if not broken else NO), f"fullgraph: {whole}; with graph breaks: {parts}"


def autocast(library: str) -> Verdict:
    def close(found: Any, expected: Any) -> str:
        for name, value in expected.items():
            if found.get(name) is None:
                return f"nothing for {name}"
            error = float((found[name].float() - value).norm() / value.norm())
            if not error < 0.1:
                return f"relative error {error:.2g} for {name}"
        return ""

    x, y = data()
    model = MLP()
    x = x.float()
    if library == "singd":

        def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

        torch.manual_seed(0)
        start = MLP().float()
        moves = []
        for make in (step, plain_step):
            end = train(SINGD.optimizer, make, steps=1, dtype=torch.float32)
            moves.append({name: end[name] - p.detach() for name, p in start.named_parameters()})
        return verdict(close(*moves), "a step in bfloat16 is close to one without")
    kind = SAMPLERS[library]
    expected = {name: value.float() for name, value in oracle(model, x, y).items()}
    attached = kind.attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(attached(x), y)
    kind.backward(loss)
    return verdict(close(kind.found(attached), expected), "close to those in float32")


def grad_scaler(library: str) -> Verdict:
    def scaled_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    if library == "singd":
        return verdict(same_as_plain(scaled_step), "as without it")
    if library == "opacus":
        scaled, plain = (moved(opacus_train(step, steps=1)) for step in (scaled_step, plain_step))
        if abs(scaled / plain - 1) < 1e-8:
            return YES, "as without it"
        times = round(scaled / plain)
        return NO, f"grad_sample keeps the scaler's factor: the step is {times} times as long"
    x, y = data()
    model = MLP().double()
    expected = oracle(model, x, y)
    BackPACK.attach(model)
    sgd, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    BackPACK.backward(scaler.scale(F.cross_entropy(model(x), y)))
    scaler.unscale_(sgd)
    found = BackPACK.found(model)
    factor = scaler.get_scale()
    if difference(found, {n: v * factor for n, v in expected.items()}):
        return NO, "neither scaled nor right"
    return PARTIAL, "grad is unscaled, grad_batch keeps the scaler's factor"


def accumulation(library: str) -> Verdict:
    def halves(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for part in (slice(0, BATCH // 2), slice(BATCH // 2, None)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        optimizer.step()

    if library == "singd":
        return verdict(same_as_plain(halves), "equal to the large batch")
    x, y = data()
    model = MLP().double()
    expected = oracle(model, x, y)
    kind = SAMPLERS[library]
    attached = kind.attach(model)
    for part in (slice(0, BATCH // 2), slice(BATCH // 2, None)):
        kind.backward(F.cross_entropy(attached(x[part]), y[part]))
    if library == "backpack":
        last = {name: value[BATCH // 2 :] * 2 for name, value in expected.items()}
        kept = difference(kind.found(attached), last)
        return (NO, kept) if kept else (PARTIAL, "grad adds up; grad_batch is the last pass's only")
    found = {name: torch.cat(parts) for name, parts in kind.found(attached).items()}
    return verdict(difference(found, expected), "grad_sample is a list of all micro-batches")


def clipping(library: str) -> Verdict:
    if library == "backpack":
        return NO_OPTIMIZER

    def clipped(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    run: Callable[..., Any] = (
        opacus_train if library == "opacus" else lambda *a, **o: train(SINGD.optimizer, *a, **o)
    )
    free, bound = (moved(run(step, steps=1)) for step in (plain_step, clipped))
    ratio = bound / free
    if ratio > 0.9:
        return (
            PARTIAL,
            "its own, per sample (max_grad_norm); clip_grad_norm_ has no effect on the step",
        )
    return YES, f"acts on the gradient before it is preconditioned (step {ratio:.1e} as long)"


def closure(library: str) -> Verdict:
    if library == "backpack":
        return NO_OPTIMIZER

    def with_closure(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)

    if library == "singd":
        return verdict(same_as_plain(with_closure), "as without it")
    return verdict(difference(opacus_train(with_closure), opacus_train()), "as without it")


def groups(library: str) -> Verdict:
    if library == "backpack":
        return NO_OPTIMIZER
    torch.manual_seed(0)
    model = MLP().double()
    parts = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "lr": 0.0}]
    before = copy.deepcopy(model)
    if library == "singd":
        optimizer = SINGD.optimizer(model, parts)
        run = model
    else:
        run = Opacus.attach(model)
        optimizer = Opacus.optimizer(run, torch.optim.SGD(parts, 0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x, y = data()
    plain_step(run, optimizer, x, y)
    scheduler.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    still = torch.equal(model.last.weight, before.last.weight)
    moved = not torch.equal(model.first.weight, before.first.weight)
    right = still and moved and rates[0] in (0.05, 0.025)
    return (YES, "rates per group, halved by ExponentialLR") if right else (NO, f"rates {rates}")


def state_dict(library: str) -> Verdict:
    if library == "backpack":
        return NO_OPTIMIZER
    x, y = data()

    def pair() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = MLP().double()
        if library == "singd":
            return model, SINGD.optimizer(model)
        model = Opacus.attach(model)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, Opacus.optimizer(model, inner)

    first, second = pair(), pair()
    plain_step(*first, x, y)
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    for model, optimizer in (first, second):
        plain_step(model, optimizer, x, y)
    wrong = [
        name
        for (name, a), b in zip(first[0].named_parameters(), second[0].parameters(), strict=True)
        if not torch.equal(a, b)
    ]
    return verdict(f"differs in {wrong[0]}" if wrong else "", "the next step is the same")
