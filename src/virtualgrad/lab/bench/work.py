"""A network with an optimizer, ready to make steps: eagerly, compiled, or in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.bench.methods import Method
from virtualgrad.lab.bench.modes import Mode, Precision
from virtualgrad.lab.bench.networks import Network
from virtualgrad.lab.bench.timing import Step, reason

PLAIN = "plain"


class CompilationError(VirtualGradError, RuntimeError):
    """A model did not compile, as it was found before."""


@dataclass(frozen=True)
class Setup:
    """How everything is measured.

    Attributes:
        device: Where.
        bandwidth: Bytes per second that its memory moves, for the floor.
        rounds: Timed blocks of each optimizer.
        block_seconds: About how long a block takes.
        warm_up: Steps before anything is timed.
        compiler: Backend of torch.compile.
        seed: Of weights and inputs.
    """

    device: torch.device
    bandwidth: float
    rounds: int = 7
    block_seconds: float = 0.25
    warm_up: int = 3
    compiler: str = "inductor"
    seed: int = 0


@dataclass
class Work:
    """A model with an optimizer, and its batch.

    Attributes:
        network: The network that the model is of.
        precision: The number format.
        method: The optimizer's record.
        forward: The model, compiled or not.
        optimizer: The optimizer.
        batch: x and y.
    """

    network: Network
    precision: Precision
    method: Method
    forward: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    batch: tuple[Tensor, Tensor]

    def step(self) -> None:
        """One training step, as in anybody's loop; without a word to the host."""
        self.optimizer.zero_grad()
        x, y = self.batch
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision.autocast):
            loss = self.network.loss(self.forward(x), y)
        self.method.backward(loss)
        self.optimizer.step()

    def captured(self, pool: Any, stream: Any) -> Step:  # pragma: no cover - needs a GPU
        """The same step as one CUDA graph.

        It must be warm: state that is made lazily has to exist, and gradients must be None, so
        that those of the graph are allocated in it. Graphs that are replayed one after the other
        may share a pool: nothing that one of them frees is read by a later replay.
        """
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self.step()
        return graph.replay


@dataclass
class _Subject:
    """A model that was compiled, with the optimizer if that is attached to it."""

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    attached: Optimizer | None


class Workshop:
    """Makes the works of one network in one precision.

    Each optimizer gets a model of its own, all from the same seed. But a compilation takes up to a
    minute, so compiled models are kept, for both compiled modes, and optimizers that do not touch
    the model take turns on one.

    Attributes:
        has_chosen_kernels: whether libraries that choose by trial have done so.
    """

    has_chosen_kernels = False

    def __init__(self, network: Network, precision: Precision, setup: Setup) -> None:
        self.network, self.precision, self.setup = network, precision, setup
        self._compiled: dict[str, _Subject] = {}
        self._failed: dict[str, str] = {}
        torch.manual_seed(setup.seed)
        with setup.device:
            x, y = network.inputs(network.batch_size)
        self.batch = (self._laid_out(x), y)

    def make(self, method: Method, mode: Mode) -> Work:
        """A new work, before its first step.

        Raises:
            CompilationError: It is to be compiled, which failed before.
            Exception: Whatever a model, an optimizer or a compiler has to say.
        """
        if not mode.compiled:
            model = method.prepare(self._model())
            return self._work(method, model, method.make(model, mode.graphed))
        subject = self._compiled_subject(method, mode)
        optimizer = subject.attached or method.make(subject.model, mode.graphed)
        return self._work(method, subject.forward, optimizer)

    def _work(
        self, method: Method, forward: Callable[[Tensor], Tensor], optimizer: Optimizer
    ) -> Work:
        return Work(self.network, self.precision, method, forward, optimizer, self.batch)

    def _compiled_subject(self, method: Method, mode: Mode) -> _Subject:
        family = PLAIN if method.statistics is None else method.name
        if family in self._failed:
            raise CompilationError(self._failed[family])
        if family not in self._compiled:
            model = self._model()
            attached = method.make(model, mode.graphed) if method.statistics else None
            forward = torch.compile(model, fullgraph=True, backend=self.setup.compiler)
            try:  # compilation happens at the first call
                optimizer = attached or method.make(model, mode.graphed)
                self._work(method, forward, optimizer).step()
            except Exception as error:
                self._failed[family] = reason(error)
                raise
            self._compiled[family] = _Subject(model, forward, attached)
        return self._compiled[family]

    def _model(self) -> nn.Module:
        torch.manual_seed(self.setup.seed)
        with self.setup.device:  # drawn where it lies: a GPU draws GPT-2's numbers in no time
            model = self.network.build()
        if self._channels_last:  # pragma: no cover - needs a GPU
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _laid_out(self, x: Tensor) -> Tensor:
        if self._channels_last:  # pragma: no cover - needs a GPU
            return x.to(memory_format=torch.channels_last)
        return x

    @property
    def _channels_last(self) -> bool:
        return self.network.images and self.setup.device.type == "cuda"
