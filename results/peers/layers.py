"""What layers a model has: one probe per feature, asked with the name of a library."""

# ruff: noqa: PLC0415 - each library is imported where it is asked for

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from libraries import (
    BATCH,
    CLASSES,
    NO,
    PARTIAL,
    SAMPLERS,
    SINGD,
    WIDTH,
    YES,
    BackPACK,
    Opacus,
    Verdict,
    data,
    difference,
    oracle,
    per_sample,
    plain_step,
    train,
    verdict,
)
from torch import Tensor, nn


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix)


def _trained_by_singd(layers: dict[str, tuple[nn.Module, tuple[int, ...]]]) -> Verdict:
    """Which layers SINGD takes by itself, and trains."""
    taken, left = [], []
    for name, (layer, shape) in layers.items():
        model = Around(layer, shape).double()
        try:
            optimizer = SINGD.optimizer(model)
            x, y = data(*shape)
            plain_step(model, optimizer, x, y)
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            known = all(id(p) in own for p in layer.parameters())
        except Exception:
            known = False
        (taken if known else left).append(name)
    if not left:
        return YES, f"all: {', '.join(taken)}"
    said = f"left to another optimizer, with a warning: {', '.join(left)}"
    return (PARTIAL, f"trains {', '.join(taken)}; {said}") if taken else (NO, said)


class Around(nn.Module):
    """A layer, and a linear one behind it."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], long: bool = False) -> None:
        super().__init__()
        self.layer, self.flat = layer, nn.Flatten()
        probe = torch.zeros(2, *shape, dtype=torch.long if long else torch.float32)
        with torch.no_grad():
            features = layer(probe).flatten(1).shape[1]
        self.last = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.flat(self.layer(x)))


def _layers(library: str, layers: dict[str, tuple[nn.Module, tuple[int, ...]]]) -> Verdict:
    if library == "singd":
        return _trained_by_singd(layers)
    right, wrong = [], {}
    for name, (layer, shape) in layers.items():
        try:
            found = per_sample(SAMPLERS[library], Around(layer, shape), shape=shape)
        except Exception as error:
            found = f"{type(error).__name__}"
        if found:
            wrong[name] = found
        else:
            right.append(name)
    if not wrong:
        return YES, f"all: {', '.join(right)}"
    said = "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
    return (PARTIAL if right else NO), f"right: {', '.join(right) or 'none'}; not: {said}"


def raw(library: str) -> Verdict:
    return _layers(library, {"x @ W": (Raw(), (WIDTH,))})


def convolutions(library: str) -> Verdict:
    layers: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
    for n, space in ((1, (5,)), (2, (5, 5)), (3, (3, 3, 3))):
        shape = (4, *space)
        kinds = getattr(nn, f"Conv{n}d"), getattr(nn, f"ConvTranspose{n}d")
        layers[f"conv{n}d"] = kinds[0](4, 4, 2), shape
        layers[f"conv_transpose{n}d"] = kinds[1](4, 4, 2), shape
        layers[f"grouped conv{n}d"] = kinds[0](4, 4, 2, groups=2), shape
        layers[f"grouped conv_transpose{n}d"] = kinds[1](4, 4, 2, groups=2), shape
    return _layers(library, layers)


def norms(library: str) -> Verdict:
    shape = (4, 5, 5)
    return _layers(
        library,
        {
            # In training it mixes samples, which then have no gradients of their own.
            "batch (eval mode)": (nn.BatchNorm2d(4).eval(), shape),
            "layer": (nn.LayerNorm(5), shape),
            "group": (nn.GroupNorm(2, 4), shape),
            "instance": (nn.InstanceNorm2d(4, affine=True), shape),
            "RMS": (nn.RMSNorm(5), shape),
        },
    )


def embedding(library: str) -> Verdict:
    model = Around(nn.Embedding(7, WIDTH), (3,), long=True).double()
    x, y = torch.arange(BATCH * 3).reshape(BATCH, 3) % 7, data()[1]
    if library == "singd":
        own = {id(p) for g in SINGD.optimizer(model).param_groups for p in g["params"]}
        known = id(model.layer.weight) in own
        return (YES, "trained") if known else (NO, "left to another optimizer, with a warning")
    kind = SAMPLERS[library]
    model.float()  # BackPACK's embedding knows no other
    expected = oracle(model, x, y)
    attached = kind.attach(model)
    kind.backward(F.cross_entropy(attached(x), y))
    return verdict(difference(kind.found(attached), expected, 1e-4), "right")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def attention(library: str) -> Verdict:
    found = _layers(library, {"attention": (Attention(), (3, WIDTH))})
    if library != "opacus" or found[0] == YES:
        return found
    from opacus.validators import ModuleValidator

    fixed = ModuleValidator.fix(Around(Attention(), (3, WIDTH)))
    wrong = per_sample(Opacus, fixed, shape=(3, WIDTH))
    kind = type(fixed.layer.attention).__name__
    return (
        (NO, wrong) if wrong else (PARTIAL, f"right once ModuleValidator.fix has put {kind} there")
    )


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.recurrent = layer or nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


def rnn(library: str) -> Verdict:
    found = _layers(library, {"LSTM": (Recurrent(), (3, WIDTH))})
    if library == "singd" or found[0] == YES:
        return found
    if library == "backpack":
        from backpack.custom_module.reduce_tuple import ReduceTuple

        lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        model = nn.Sequential(
            lstm, ReduceTuple(index=0), nn.Flatten(), nn.Linear(3 * WIDTH, CLASSES)
        )
        wrong = per_sample(BackPACK, model, shape=(3, WIDTH))
        return (NO, wrong) if wrong else (PARTIAL, "right in a Sequential with its ReduceTuple")
    from opacus.validators import ModuleValidator

    fixed = ModuleValidator.fix(Around(Recurrent(), (3, WIDTH)))
    wrong = per_sample(Opacus, fixed, shape=(3, WIDTH))
    kind = type(fixed.layer.recurrent).__name__
    return (
        (NO, wrong) if wrong else (PARTIAL, f"right once ModuleValidator.fix has put {kind} there")
    )


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.base(x) + self.up(self.down(x))))


def frozen(library: str) -> Verdict:
    if library != "singd":
        return verdict(per_sample(SAMPLERS[library], LoRA()), "right for the adapters")
    torch.manual_seed(0)
    start = dict(LoRA().double().named_parameters())
    end = train(SINGD.optimizer, model=LoRA)
    moved = {name.split(".")[0] for name in start if not torch.equal(start[name], end[name])}
    right = moved == {"down", "up", "last"}
    return (YES, "only the adapters move") if right else (NO, f"moved: {sorted(moved)}")


def typed(library: str) -> Verdict:
    spec = find_spec(library)
    assert spec is not None and spec.origin is not None
    has = (Path(spec.origin).parent / "py.typed").exists()
    return (YES, "has py.typed") if has else (NO, "no py.typed in the wheel")
