"""Several backward passes through one compiled graph: refused, by the step that they are for.

Eager passes through one graph (``backward(retain_graph=True)``) are one gradient to T, for which it
keeps g from the first to the last. A compiled pass has nowhere to keep it (:mod:`.compiled` of the
operators says why), so what it prepares is not a number, by which a step finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtualgrad.errors import RetainedGraphError
from virtualgrad.operators import StatefulOperator


def refuse_second_passes(operator: StatefulOperator) -> None:
    """Raise, and forget what was prepared, if it is not finite for such passes.

    Called where it is known not to be finite: the host waits for the answer.
    """
    sites = operator.sites_counted_twice()
    if not sites:
        return
    operator.rollback()
    raise second_passes_error(sites)


def second_passes_error(sites: Sequence[str]) -> RetainedGraphError:
    """The error for second passes that have reached these sites."""
    more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return RetainedGraphError.of(
        given=f"a second backward pass through a compiled graph (retain_graph=True) before one "
        f"step, at {sites[0]}{more}",
        allowed="one backward pass through each compiled graph, in the order of the forward "
        "passes: g is not kept for a second one; parameters and state are as they were",
        todo="add up the losses and call backward() once, or leave out torch.compile",
    )
