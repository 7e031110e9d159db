"""Whole steps in C++, where :mod:`virtualgrad.native` was built: the plainest kind of step.

    look at all gradients and statistics  ->  theta - lr v, r and T's factors

It is what :mod:`.descent` does otherwise, call by call, to the same bits: descent without momentum
and weight decay along plain gradients, and the commit of all sites that were reached.
Whatever else there is to be done, Python does all of it, and tells what is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler
from torch.optim import Optimizer

from virtualgrad.native import built
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.kernels import may_launch

ON_CPU = torch.device("cpu")


def step_on_cpu(groups: list[dict[str, Any]], operator: StatefulOperator, *, looks: bool) -> bool:
    """Make a step on a CPU; False, and nothing was done, where it is left to Python.

    Args:
        groups: of parameters.
        operator: T, with what backward passes have brought to it.
        looks: whether a NaN or an infinity is looked for; one is left to Python.
    """
    if torch.compiler.is_compiling() or may_launch(ON_CPU):  # by Triton's interpreter, in tests
        return False
    library = built()
    sites = None if library is None else operator.plain_sites()
    if library is None or sites is None:
        return False
    if not library.step_on_cpu(groups, sites, PLAIN, looks):
        return False
    operator.note_commit()
    return True


def forget_gradients(optimizer: Optimizer) -> bool:
    """Set all gradients to None; False, and nothing was done, where that is left to torch."""
    # A profiler sees it under torch's name. To have it told where none is on takes the most time.
    if torch.compiler.is_compiling() or profiler._is_profiler_enabled:
        return False
    library = built()
    return library is not None and library.forget_gradients(optimizer.param_groups, PLAIN)
