"""One training run: a network, an optimizer and their batches; step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.batches import Batches, EvaluationSet
from virtualgrad.lab.data import ImageData
from virtualgrad.lab.optimizers import OPTIMIZERS, state_bytes
from virtualgrad.lab.recipes import Recipe
from virtualgrad.lab.record import Record, environment


@dataclass(frozen=True)
class Setup:
    """How runs are to be made, beside what the recipe says.

    Attributes:
        device: where everything lies.
        amp: bfloat16 autocast for forward and backward.
        channels_last: memory format of images and convolutions.
        compiled: torch.compile the network for training.
    """

    device: torch.device
    amp: bool = False
    channels_last: bool = False
    compiled: bool = False


class Run:
    """A run that can be stepped, looked at, saved and resumed."""

    def __init__(
        self, recipe: Recipe, optimizer: str, seed: int, data: ImageData, setup: Setup
    ) -> None:
        self.recipe = recipe
        self.setup = setup
        self.tuned = recipe.optimizers[optimizer]
        torch.manual_seed(seed)  # initial weights
        self.model = recipe.network().to(setup.device)
        if setup.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.tuned.method not in OPTIMIZERS:
            raise HyperparameterError.of(
                given=f"the method {self.tuned.method!r} for {optimizer} in {recipe.name!r}",
                allowed=", ".join(OPTIMIZERS),
                todo="add yours to virtualgrad.lab.optimizers.OPTIMIZERS first",
            )
        self.optimizer = OPTIMIZERS[self.tuned.method](
            self.model, self.tuned.lr[0], **self.tuned.options
        )
        self._training_loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if setup.compiled:
            self._training_loss = torch.compile(self._loss, fullgraph=True, dynamic=False)
        self.batches = Batches(
            data,
            recipe.batch_size,
            seed,
            setup.device,
            setup.channels_last,
            compiled=setup.compiled,
        )
        self.penalized = [
            parameter
            for module in self.model.modules()
            if isinstance(module, nn.Linear | nn.Conv2d)
            for parameter in module.parameters()
        ]
        self.step = 0
        self._loss_sum = torch.zeros((), device=setup.device)
        self._losses = 0
        self._test_loss = torch.zeros((), device=setup.device)
        self._test_wrong = torch.zeros((), device=setup.device)
        settings = {
            "batch_size": recipe.batch_size,
            "steps": recipe.steps,
            "milestones": list(recipe.milestones),
            "l1": recipe.l1,
            "lr": list(self.tuned.lr),
            "method": self.tuned.method,
            **{key: _plain(value) for key, value in self.tuned.options.items()},
            "amp": setup.amp,
            "channels_last": setup.channels_last,
            "device": setup.device.type,
            **({"compiled": True} if setup.compiled else {}),
        }
        self.record = Record(
            recipe.name,
            optimizer,
            seed,
            settings,
            environment(setup.device),
            {"name": data.name, "source": data.source},
        )

    def set_learning_rate(self) -> None:
        """Give the optimizer the learning rate of the current phase."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.tuned.lr[self.recipe.phase(self.step)]

    def train_step(self) -> None:
        """One step, without a word to the host: it can be captured in a CUDA graph."""
        x, y = self.batches.next()
        self.optimizer.zero_grad()
        loss = self._training_loss(x, y)
        loss.backward()
        # d(l1 |w|)/dw = l1 sign(w): |w| is not linear, so its gradient stays untransformed.
        grads = [p.grad for p in self.penalized]
        torch._foreach_add_(grads, torch._foreach_sign(self.penalized), alpha=self.recipe.l1)  # type: ignore[arg-type]
        self.optimizer.step()
        self._loss_sum += loss.detach()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self._forward(x), y)

    def _forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.setup.device.type, torch.bfloat16, enabled=self.setup.amp):
            logits: Tensor = self.model(x)
        return logits.float()

    def advance(self, steps: int) -> None:
        """Count steps that were made."""
        self.step += steps
        self._losses += steps

    @torch.no_grad()
    def look(self, held_out: EvaluationSet) -> None:
        """Look at the test set, without a word to the host, as a step does."""
        self._test_loss.zero_()
        self._test_wrong.zero_()
        for x, y in held_out:
            logits = self._forward(x)
            self._test_loss += F.cross_entropy(logits, y, reduction="sum")
            self._test_wrong += (logits.argmax(1) != y).sum()

    def note(self, held_out: EvaluationSet) -> None:
        """Add to the learning curve what was seen in the last look."""
        count = len(held_out.labels)
        curve = self.record.curve
        curve.step.append(self.step)
        curve.train_loss.append(self._loss_sum.item() / max(self._losses, 1))
        curve.test_loss.append(self._test_loss.item() / count)
        curve.test_error.append(100 * self._test_wrong.item() / count)
        self._loss_sum.zero_()
        self._losses = 0

    def finish(self) -> None:
        """Complete the record."""
        self.record.state_bytes = state_bytes(self.optimizer)
        if self.setup.device.type == "cuda":  # pragma: no cover - needs a GPU
            self.record.peak_memory_bytes = torch.cuda.max_memory_allocated(self.setup.device)
        self.record.finished = True

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, bit by bit."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "curve": vars(self.record.curve),
            "loss_sum": self._loss_sum,
            "losses": self._losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self._loss_sum.copy_(state["loss_sum"])
        self._losses = state["losses"]
        for name, values in state["curve"].items():
            setattr(self.record.curve, name, list(values))


def _plain(value: Any) -> Any:
    """A setting as JSON knows it: functions by their name."""
    return getattr(value, "__name__", value)
