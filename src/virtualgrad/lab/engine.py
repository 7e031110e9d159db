"""The one training loop: several runs of a recipe side by side, on the CPU or in a CUDA graph.

On a GPU one small network leaves most of the chip idle. The step of every run is captured on a
stream of its own into one CUDA graph, and a replay makes one step of all of them, with no work for
the host. The first steps of each phase run eagerly (they are real steps), then the rest replays.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch
import torch._functorch.config as functorch_config

from virtualgrad.lab.batches import EvaluationSet
from virtualgrad.lab.run import Run

EAGER_STEPS = 4
"""Steps of a phase that run eagerly before capture: lazily made state must exist by then."""

SECONDS_UNWATCHED = 0.2
"""On a CPU, steps are made for about so long before the caller hears of them."""


class Engine:
    """Makes the same steps in all runs of a group."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.device = runs[0].setup.device
        self.seconds = 0.0
        self.steps = 0
        if runs[0].setup.compiled:
            torch._dynamo.reset()  # a compiler keeps no more than a few versions of a function
            # Five runs of one network give five times the same graph: the compiler may remember it,
            # though it holds Functions of our own.
            functorch_config.autograd_cache_allow_custom_autograd_functions = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._looks: torch.cuda.CUDAGraph | None = None
        self._streams: list[torch.cuda.Stream] = []
        if self.device.type == "cuda":  # pragma: no cover - needs a GPU
            self._streams = [torch.cuda.Stream(self.device) for _ in runs]
            gc.collect()  # the runs before these, and the graph that held their memory
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def train(
        self,
        held_out: EvaluationSet,
        on_evaluation: Callable[[], None],
        on_progress: Callable[[], None],
    ) -> None:
        """Train all runs to their end, with an evaluation every so often.

        Args:
            held_out: What the runs are evaluated on.
            on_evaluation: Called when the learning curves have one point more.
            on_progress: Called between two steps, when all runs can be saved; what it raises ends
                the training there.
        """
        recipe = self.runs[0].recipe
        for run in self.runs:
            run.batches.seek(run.step)
        while (step := self.runs[0].step) < recipe.steps:
            if self._graph is None or step in recipe.milestones:
                self._begin_phase()
            self._make(self._until_next_event(step))
            step = self.runs[0].step
            if step % self.runs[0].batches.per_epoch == 0:
                for run in self.runs:
                    run.batches.seek(step)
            if step % recipe.evaluate_every == 0 or step == recipe.steps:
                self._evaluate(held_out)
                on_evaluation()
            on_progress()

    def _until_next_event(self, step: int) -> int:
        """Steps until an epoch, a phase, an evaluation or the run ends."""
        recipe, per_epoch = self.runs[0].recipe, self.runs[0].batches.per_epoch
        events = [recipe.steps, (step // per_epoch + 1) * per_epoch]
        events += [milestone for milestone in recipe.milestones if milestone > step]
        events.append((step // recipe.evaluate_every + 1) * recipe.evaluate_every)
        return min(events) - step

    def _begin_phase(self) -> None:
        for run in self.runs:
            run.set_learning_rate()
        self._graph = None

    def _evaluate(self, held_out: EvaluationSet) -> None:
        """Add a point to every learning curve."""
        if self._streams:  # pragma: no cover - needs a GPU
            self._look_on_gpu(held_out)
        else:
            for run in self.runs:
                run.look(held_out)
        for run in self.runs:
            run.note(held_out)
            run.record.ms_per_step = 1e3 * self.seconds / self.steps / len(self.runs)

    def _look_on_gpu(self, held_out: EvaluationSet) -> None:  # pragma: no cover - needs a GPU
        """Look at the test set with all runs at once: the first time eagerly, then by replays."""
        if self._looks is not None:
            self._looks.replay()
            return
        self._on_streams(lambda run: run.look(held_out))
        torch.cuda.synchronize(self.device)
        self._looks = self._captured(lambda run: run.look(held_out))

    def _make(self, most: int) -> None:
        """Make some steps of every run, at most so many, and take the time."""
        begin = self._now()
        made = self._make_on_gpu(most) if self._streams else self._make_on_cpu(most)
        for run in self.runs:
            run.advance(made)
        self.seconds += self._now() - begin
        self.steps += made

    def _make_on_cpu(self, most: int) -> int:
        end = time.perf_counter() + SECONDS_UNWATCHED
        for made in range(1, most + 1):
            for run in self.runs:
                run.train_step()
            if time.perf_counter() > end:
                return made
        return most

    def _make_on_gpu(self, count: int) -> int:  # pragma: no cover - needs a GPU
        left = count
        if self._graph is None:
            eager = min(EAGER_STEPS, count)
            for _ in range(eager):
                self._on_streams(Run.train_step)
            left -= eager
            torch.cuda.synchronize(self.device)
            self._graph = self._captured(Run.train_step)
        for _ in range(left):
            self._graph.replay()
        for run in self.runs:  # while the GPU works
            run.batches.draw_ahead(run.step + count)
        return count

    def _captured(self, work: Callable[[Run], None]) -> torch.cuda.CUDAGraph:  # pragma: no cover
        """The same work of every run as one CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._on_streams(work)
        return graph

    def _on_streams(self, work: Callable[[Run], None]) -> None:  # pragma: no cover - needs a GPU
        """The same work of every run, each on a stream of its own."""
        main = torch.cuda.current_stream(self.device)
        for run, stream in zip(self.runs, self._streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                work(run)
        for stream in self._streams:
            main.wait_stream(stream)

    def _now(self) -> float:
        if self._streams:  # pragma: no cover - needs a GPU
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
