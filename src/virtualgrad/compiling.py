"""What compilers (torch.compile) need to be told, and what CUDA graphs must be asked.

A compiler traces the Python of a forward pass once, and runs only the tensor part afterwards. The
helpers here mark what is settled while it traces.

Whether it traces, ``torch.compiler.is_compiling()`` tells. What a forward pass calls has that by
name: in each file that names ``torch`` the compiler guards it once more. But a frame with which it
begins anew, behind a graph break, it passes over if there is no tensor among its arguments and no
``torch`` in its code: so those of a step, and of a module's call, name it in full.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def settled_while_tracing(function: Function) -> Function:
    """A function that a compiler calls for real, once, taking its result for a constant.

    It may do host work such as making room for state. Arguments and result must be plain values.
    (This is torch.compiler.assume_constant_result, which imports the whole compiler when it is
    applied; the mark is all that it leaves.)
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(reason: str) -> Callable[[Function], Function]:
    """A function that a compiler leaves its graph for, or, with ``fullgraph``, refuses by a reason.

    For errors. One that is raised while a compiler traces is not the user's to see: it goes on
    without tracing, and compiles what it finds further inside. (This is torch.compiler.disable, of
    which the same is true as above.)
    """

    def mark(function: Function) -> Function:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark


def fixed(number: int) -> int:
    """The number itself; a compiler that has a symbol for it takes the number that it is now."""
    return range(number).stop


def all_fixed(numbers: Sequence[int]) -> tuple[int, ...]:
    """The numbers, each :func:`fixed`; written out, as compilers trace every call."""
    return tuple([range(number).stop for number in numbers])


def is_in_compiled_graph(is_own: Callable[[Any], bool]) -> bool:
    """Whether the torch function that asks was called by a graph that torch.compile has traced.

    Those of most backends call none. ``backend="eager"`` runs the graph as it was traced, and a
    mode that is on around it, which was traced as well, is asked once more.

    The graph knows who has made it, as users have graphs of their own, by torch.fx. But one of
    torch.export knows that, too, and may be a module of the model: ``is_own`` tells.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_GRAPH):
            graph = frame.f_locals.get("self")
            if _BY_COMPILER in getattr(graph, "meta", ()):
                return not is_own(graph)
        elif file.startswith(_OURS):  # a module runs
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


_GRAPH = "<eval_with_key>"  # what torch.fx calls the files of its graphs
_BY_COMPILER = "dynamo_compile_id"
_OURS = str(Path(__file__).parent)


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph.

    Before anything was done on a GPU it does not; to ask whether there is one takes far longer.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
