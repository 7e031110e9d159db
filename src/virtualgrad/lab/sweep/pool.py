"""The workers of one machine: one in this process, or several of their own.

Ctrl-C is a request: every worker puts the trial it is at back and ends; a second one does not wait.
Either way no finished trial is lost, and the same command goes on.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event

import torch
from rich.console import Console

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.interrupt import StopRequest
from virtualgrad.lab.sweep.display import Display
from virtualgrad.lab.sweep.search import Search, SweepError, Trial
from virtualgrad.lab.sweep.storage import Store
from virtualgrad.lab.sweep.studies import finished_trials, open_study
from virtualgrad.lab.sweep.worker import work

SECONDS_BETWEEN_LOOKS = 0.2


def run_searches(
    searches: Sequence[Search], store: Store, workers: int, console: Console
) -> list[list[Trial]]:
    """Make the trials of all searches, and return those that are finished.

    Raises:
        SweepError: The database or a worker failed, or a study does not fit.
        KeyboardInterrupt: Ctrl-C was pressed; every finished trial is kept.
    """
    with store.opened() as storage:
        pairs = [(search, open_study(search, store, storage)) for search in searches]
        with StopRequest() as stop, Display(pairs, console) as display:
            if workers == 1:
                work(searches, store, lambda: stop.made, display.tick)
            else:
                _work_in_processes(searches, store, workers, stop, display)
        if stop.made:
            raise KeyboardInterrupt
        return [finished_trials(study) for _, study in pairs]


def _work_in_processes(
    searches: Sequence[Search], store: Store, workers: int, stop: StopRequest, display: Display
) -> None:
    context = _context()
    stopping = context.Event()
    threads = max(1, torch.get_num_threads() // workers)
    children: dict[Connection, BaseProcess] = {}
    for number in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(
            target=_child,
            args=(searches, store, threads),
            kwargs={"stopping": stopping, "pipe": theirs},
            name=f"worker {number}",
            daemon=True,
        )
        child.start()
        theirs.close()
        children[ours] = child
    try:
        problems = _watch(children, stop, stopping, display)
    finally:
        for each in children.values():
            each.terminate()  # none is alive, unless a second Ctrl-C or an error ends us
            each.join()
    if problems:
        raise SweepError.of(
            given=f"a worker that could not go on: {problems[0].strip()}",
            allowed="settings, data and a database that the workers can use",
            todo="mend the cause, then give the same command again: finished trials are kept",
        )


def _context() -> SpawnContext | ForkServerContext:
    """How processes start: no fork of this one, as CUDA and threads would not survive it.

    A fork server imports torch once for all workers; that takes longer than many a trial.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():  # pragma: no cover - Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _watch(
    children: dict[Connection, BaseProcess], stop: StopRequest, stopping: Event, display: Display
) -> list[str]:
    """Wait for all workers to end, and return what went wrong with them."""
    problems: list[str] = []
    killed: list[str] = []
    open_pipes = dict(children)
    while open_pipes:
        display.tick()
        if stop.made:
            stopping.set()
        for pipe in wait(list(open_pipes), timeout=SECONDS_BETWEEN_LOOKS):
            assert isinstance(pipe, Connection)
            child = open_pipes.pop(pipe)
            try:
                problem = pipe.recv()
            except EOFError:  # it ended without a word
                child.join()
                killed.append(f"{child.name} ended with the exit code {child.exitcode}")
                display.console.print(f"{killed[-1]}; its trial will be taken over.")
                continue
            if problem:
                problems.append(problem)
                stopping.set()  # what failed one will fail the others
    return problems or (killed if len(killed) == len(children) else [])


def _child(
    searches: Sequence[Search],
    store: Store,
    threads: int,
    *,
    stopping: Event,
    pipe: Connection,
) -> None:  # pragma: no cover - runs where coverage is not measured
    """Work in a process of its own, and tell the parent how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def stop() -> bool:
        orphaned = parent is not None and not parent.is_alive()  # nobody else would stop us
        return stopping.is_set() or orphaned

    try:
        work(searches, store, stop, lambda: None)
    except VirtualGradError as error:
        pipe.send(str(error))
    except Exception:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
