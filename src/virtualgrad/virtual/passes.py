"""Encapsulation 1, the life of a pass: which forward pass an op belongs to.

A layer that is used twice in one graph has two sites. So uses are counted per graph, and what
makes a graph is not the call of a model: several calls may precede one backward pass, and a
backward pass may run parts of the forward again (activation checkpointing).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from virtualgrad.compiling import is_capturing
from virtualgrad.operators import Operator, as_stateful
from virtualgrad.virtual.tracking import Pass

CALLS = ""  # among the uses: compiled calls of the model, or of parts of it


def _no_pass() -> None:
    """Stands for the reference to a pass that is over."""


class Passes:
    """The forward passes of one model, one after the other.

    Args:
        operator: T; it is told where the graphs of compiled passes end.

    Attributes:
        current: the pass that runs now.
        before: called before each forward pass that the user makes.
        loss_scale: the factor of the loss (a GradScaler's) in the passes that begin from now on.
        ranks: the number of processes that share the batch.
    """

    def __init__(self, operator: Operator) -> None:
        self.current = Pass(None)
        self.before: Callable[[], None] = lambda: None
        self.loss_scale = 1.0
        self.ranks = 1
        self._live: Callable[[], Pass | None] = weakref.ref(self.current)
        self._operator = as_stateful(operator)
        self._batch_size: int | None = None  # of the last call
        self._batch_sizes: set[int | None] = set()  # of all calls of this step
        self._recomputing: Pass | None = None  # by the backward pass that runs now
        self._has_begun = False  # an eager forward pass, since the last step
        # Uses since the last backward pass in compiled calls, which no graph of ours holds alive.
        self._uses_in_training: dict[str, int] = {}
        self._uses_in_eval: dict[str, int] = {}
        self._watched: Any = None  # the handle of a hook that tells of compiled backward passes
        self._rests = False  # since the last step
        self._sees_all = True  # whether it knows of every pass that there may be

    @property
    def at_rest(self) -> bool:
        """Whether nothing can have been prepared since the last step, of which all is committed.

        Only where all passes are compiled, and seen here: then forgetting copies all of r. Not once
        a graph was kept (it may be run again, any time), captured (its replays pass by the host),
        or left without a ``backward()`` that would have shown (``torch.autograd.grad``); nor once
        two were alive at a time, of which one that comes back alone is not seen. And not while a
        graph is captured: what is at rest now need not be so at each of its replays.
        """
        rests = self._rests and self._sees_all and not self._has_compiled_uses()
        return rests and not is_capturing()

    def begin(self, batch_size: int | None, training: bool) -> None:
        """Begin a forward pass, or go on with one that no backward pass has consumed yet.

        Two calls of a model before one backward pass belong to one graph: its layers are used
        twice, and each use is a site of its own. A call in eval mode does not go on with one in
        training mode, or the other way round.
        """
        if is_compiling():
            uses = self._uses_in_training if training else self._uses_in_eval
            if is_grad_enabled():
                uses[CALLS] = uses.get(CALLS, 0) + 1
            self.current = Pass(
                batch_size, training, uses, loss_scale=self.loss_scale, ranks=self.ranks
            )
            return
        self._sees_all = self._sees_all and not is_grad_enabled()
        task = torch._C._current_graph_task_id()
        if task == -1:
            self._end_recomputing()  # of a backward pass that has failed
            self._has_begun = True
            self.before()
            self._batch_size = batch_size
            self._batch_sizes.add(batch_size)
            current = self._live()
            if current is None or current.consumed or current.training != training:
                current = Pass(batch_size, training)
                self._operator.begin_graph()  # parts of it may be compiled
        else:
            current = self._recomputed(task, training)
            # A checkpoint may begin in the middle, behind a reshape: the batch is that of a call.
            if batch_size not in self._batch_sizes:
                batch_size = self._batch_size
        current.batch_size = batch_size
        current.loss_scale, current.ranks = self.loss_scale, self.ranks
        self._live = weakref.ref(current)
        self.current = current

    def _recomputed(self, task: int, training: bool) -> Pass:
        """The pass of which a backward pass recomputes a checkpoint; one for all of them.

        The next forward pass ends it. Where the rest is compiled there is none that is seen: then
        it ends with the backward pass.
        """
        if self._recomputing is None:
            self._recomputing = self._live() or Pass(self._batch_size, training)
            if not self._has_begun:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(self._end_recomputed_alone)
        self._recomputing.begin_rerun(task)
        return self._recomputing

    def _end_recomputing(self) -> None:
        self._recomputing = None

    def _end_recomputed_alone(self) -> None:
        self._recomputing = None
        self._live = _no_pass  # also where something has yet to let go of it

    def leave(self) -> None:
        """End a forward pass: only the graph keeps it alive from here on."""
        self.current = Pass(None)

    def end_step(self, *, failed: bool = False, committed: bool = False) -> None:
        """What was run so far belongs to the past: the next forward pass starts to count anew.

        Args:
            failed: it ends for an error in a forward pass; T has what was prepared before.
            committed: what T has prepared is its state now.
        """
        current = self._live()
        under_way = self._has_compiled_uses()
        self._sees_all = self._sees_all and not under_way
        self._rests = committed
        if current is not None:
            under_way = under_way or not current.consumed
            current.consumed = True
        self._batch_sizes.clear()
        self._forget_compiled_uses()
        if not failed:  # nor ended early, as what a checkpoint runs again is
            self._end_recomputing()
            self._has_begun = False
            self._operator.begin_graph(first=not under_way)
        elif not is_compiling():  # it goes on, or fails again, without tracing
            self._operator.begin_graph()

    def watch_backward(self, parameter: Tensor) -> None:
        """Have one parameter tell of compiled backward passes: they consume no pass of ours."""
        if self._watched is None:
            self._watched = parameter.register_post_accumulate_grad_hook(self._end_compiled)

    def release(self) -> None:
        """Let go of the parameter that is watched."""
        if self._watched is not None:
            self._watched.remove()
        self._watched = None

    def _end_compiled(self, *_: Any) -> None:
        """A compiled backward pass is over: what follows has the same sites, in another graph."""
        self._rests = False
        calls = self._uses_in_training.get(CALLS, 0) + self._uses_in_eval.get(CALLS, 0)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if calls > 1 or is_kept or is_capturing():
            self._sees_all = False
        self._forget_compiled_uses()
        self._operator.begin_graph()

    def _has_compiled_uses(self) -> bool:
        return bool(self._uses_in_training or self._uses_in_eval)

    def _forget_compiled_uses(self) -> None:
        self._uses_in_training.clear()
        self._uses_in_eval.clear()
