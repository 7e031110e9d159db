"""BackPACK, Opacus and SINGD behind one small interface, for the probes beside this file.

Two kinds of question can be asked of them, each with an oracle that knows nothing of the library:

* ``per_sample`` (BackPACK, Opacus): is the gradient of every sample that of a loop over samples?
* ``train`` (Opacus, SINGD): are the parameters after some steps those of the plain run?
"""

# ruff: noqa: PLC0415 - each library is imported where it is asked for

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
BATCH, WIDTH, CLASSES = 6, 4, 3


class MLP(nn.Module):
    """What most probes train; ``middle`` may be replaced."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Tanh() if middle is None else middle
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)).flatten(1))


def data(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, *(shape or (WIDTH,)), generator=generator).double()
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def require_sound(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Blame no library for a model that plain PyTorch does not train."""
    try:
        F.cross_entropy(copy.deepcopy(model)(x), y).backward()
    except Exception as error:
        raise SystemExit(f"the probe itself is wrong: {error}") from error


def oracle(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of each sample's loss, sample by sample."""
    require_sound(model, x, y)
    model = copy.deepcopy(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each: dict[str, list[Tensor]] = {name: [] for name in named}
    for sample in range(len(x)):
        loss = F.cross_entropy(model(x[sample : sample + 1]), y[sample : sample + 1])
        for name, g in zip(named, torch.autograd.grad(loss, named.values()), strict=True):
            each[name].append(g)
    return {name: torch.stack(gradients) for name, gradients in each.items()}


def difference(
    found: dict[str, Tensor | None], expected: dict[str, Tensor], tolerance: float = 1e-8
) -> str:
    """What is wrong with what was found; nothing if it is right, in float64 to 1e-8."""
    for name, value in expected.items():
        here = found.get(name)
        if here is None:
            return f"nothing for {name}"
        if here.shape != value.shape:
            return f"shape {tuple(here.shape)} in place of {tuple(value.shape)} for {name}"
        if not torch.allclose(here, value, rtol=tolerance, atol=tolerance / 100):
            error = float((here - value).norm() / value.norm())
            return f"wrong for {name} (relative error {error:.2g})"
    return ""


class BackPACK:
    """``extend(model)``, and ``grad_batch`` of its BatchGrad."""

    @staticmethod
    def attach(model: nn.Module) -> nn.Module:
        from backpack import extend

        return extend(model)

    @staticmethod
    def backward(loss: Tensor) -> None:
        from backpack import backpack
        from backpack.extensions import BatchGrad

        with backpack(BatchGrad()):
            loss.backward()

    @staticmethod
    def found(model: nn.Module) -> dict[str, Tensor | None]:
        """Of a mean loss it keeps g/m; here per sample."""
        return {
            name: None if not hasattr(p, "grad_batch") else p.grad_batch * BATCH
            for name, p in model.named_parameters()
            if p.requires_grad
        }


class Opacus:
    """``GradSampleModule(model)`` with ``grad_sample``; DPOptimizer without noise or clipping."""

    @staticmethod
    def attach(model: nn.Module) -> nn.Module:
        from opacus import GradSampleModule

        return GradSampleModule(model)

    @staticmethod
    def backward(loss: Tensor) -> None:
        loss.backward()

    @staticmethod
    def found(model: nn.Module) -> dict[str, Tensor | None]:
        named = model.named_parameters()
        return {
            name.removeprefix("_module."): getattr(p, "grad_sample", None)
            for name, p in named
            if p.requires_grad
        }

    @staticmethod
    def optimizer(model: nn.Module, inner: Any = None, size: int = BATCH) -> Any:
        from opacus.optimizers import DPOptimizer

        inner = inner or torch.optim.SGD(model.parameters(), 0.1)
        return DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1e9, expected_batch_size=size)


class SINGD:
    """The optimizer, with its factors renewed in every step."""

    @staticmethod
    def optimizer(model: nn.Module, params: Any = None, **options: Any) -> Any:
        from singd.optim.optimizer import SINGD as Optimizer

        return Optimizer(model, params, lr=0.05, T=1, **options)


def per_sample(
    library: Any,
    model: nn.Module,
    *,
    shape: tuple[int, ...] = (),
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    expect: nn.Module | None = None,
) -> str:
    """What is wrong with a library's gradients per sample; nothing if they are right."""
    model = model.double()
    x, y = data(*shape)
    expected = oracle(expect.double() if expect is not None else model, x, y)
    attached = library.attach(model)
    library.backward(F.cross_entropy(wrap(attached)(x), y))
    return difference(library.found(attached), expected)


Step = Callable[[Any, Any, Tensor, Tensor], None]


def plain_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(
    optimizer: Callable[[nn.Module], Any],
    step: Step = plain_step,
    *,
    model: Callable[[], nn.Module] = MLP,
    attach: Callable[[nn.Module], nn.Module] = lambda model: model,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Parameters after some steps from a fixed start."""
    torch.manual_seed(0)
    plain = model().to(dtype)
    x, y = data()
    x = x.to(dtype)
    require_sound(plain, x, y)
    trained = attach(plain)
    made = optimizer(trained)
    for _ in range(steps):
        step(trained, made, x, y)
    return {n.removeprefix("_module."): p.detach() for n, p in trained.named_parameters()}


Verdict = tuple[str, str]
YES, PARTIAL, NO, NONE = "yes", "partial", "no", "–"
SAMPLERS = {"backpack": BackPACK, "opacus": Opacus}
NO_OPTIMIZER = (NONE, "BackPACK has no optimizer: torch's own is used")


def verdict(wrong: str, saw: str) -> Verdict:
    return (NO, wrong) if wrong else (YES, saw)


def same_as_plain(step: Any, **options: Any) -> str:
    """SINGD: what differs from the plain run."""
    return difference(train(SINGD.optimizer, step, **options), train(SINGD.optimizer))


def opacus_train(step: Any = plain_step, **options: Any) -> dict[str, Tensor]:
    return train(Opacus.optimizer, step, attach=Opacus.attach, **options)


def moved(end: dict[str, Tensor]) -> float:
    """How far the parameters of an MLP have come from where ``train`` begins."""
    torch.manual_seed(0)
    start = MLP().double()
    return sum(float((end[n] - p).norm()) ** 2 for n, p in start.named_parameters()) ** 0.5
