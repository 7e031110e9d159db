"""NaN and infinite gradients: found before a step changes anything, and named by their place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from virtualgrad.compiling import is_capturing
from virtualgrad.errors import NonFiniteError
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.finite import FiniteCheck


class GradientCheck:
    """Where a step meets a NaN or infinite gradient.

    Args:
        named: name and parameter, in order.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self._names: list[str] | None = None  # of what was looked at
        self._check = FiniteCheck()

    def look_ahead(self) -> None:
        """Look at the gradients, while what T has seen travels between processes."""
        if not is_capturing():
            self._check.add(self._gradients())

    def places(self, operator: StatefulOperator) -> Sequence[str]:
        """The sites with a NaN or infinite g, first one first; without any, such a parameter.

        What T has seen is asked first: of a NaN in one layer, all layers below have one in their
        gradients, and only the sites tell where backward met it first.
        """
        if is_capturing():
            return []  # the host cannot look while a CUDA graph is captured or replayed
        sites = operator.witnesses()
        values = self._gradients() if self._names is None else []
        self._check.add([*values, *(witness for _, witness in sites)])
        names = [*(self._names or ()), *(key for key, _ in sites)]
        found = self._check.nonfinite()
        at_sites = [names[place] for place in found if place >= len(names) - len(sites)]
        return at_sites or [names[place] for place in found[:1]]

    def _gradients(self) -> list[Tensor]:
        grads = [(name, p.grad) for name, p in self._named if p.grad is not None]
        self._names = [name for name, _ in grads]
        return [grad._values() if grad.is_sparse else grad for _, grad in grads]


def nonfinite_error(places: Sequence[str]) -> NonFiniteError:
    """The error for gradients that are NaN or infinite at these places."""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return NonFiniteError.of(
        given=f"a NaN or infinite gradient at {places[0]}{more}",
        allowed="finite gradients; parameters and state are as they were before this step",
        todo="look at the inputs and the loss of this batch, lower lr or scale, or pass "
        "nonfinite='skip' to skip such steps",
    )
