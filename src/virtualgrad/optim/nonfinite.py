"""NaN and infinite gradients: found before a step changes anything, and named by their place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from virtualgrad.compiling import is_capturing
from virtualgrad.errors import NonFiniteError
from virtualgrad.operators import StatefulOperator
from virtualgrad.operators.finite import FiniteCheck
from virtualgrad.optim.gradients import GroupGradients


class GradientCheck:
    """Where a step meets a NaN or infinite gradient.

    Args:
        gradients: those of the step; names are read where there is something to tell.
    """

    def __init__(self, gradients: Sequence[GroupGradients]) -> None:
        self._gradients = gradients
        self._has_looked = False
        self._check = FiniteCheck()

    def look_ahead(self) -> None:
        """Look at the gradients, while what T has seen travels between processes."""
        if not is_capturing():
            self._check.add(self._values())

    def places(self, operator: StatefulOperator) -> Sequence[str]:
        """The sites with a NaN or infinite g, first one first; without any, such a parameter.

        What T has seen is asked first: of a NaN in one layer, all layers below have one in their
        gradients, and only the sites tell where backward met it first.
        """
        if is_capturing():
            return []  # the host cannot look while a CUDA graph is captured or replayed
        sites = operator.witnesses()
        values = [] if self._has_looked else self._values()
        self._check.add(values + [witness for _, witness in sites])
        found = self._check.nonfinite()
        if not found:
            return []
        names = [*self._names(), *(key for key, _ in sites)]
        at_sites = [names[place] for place in found if place >= len(names) - len(sites)]
        return at_sites or [names[place] for place in found[:1]]

    def _values(self) -> list[Tensor]:
        self._has_looked = True
        values: list[Tensor] = []
        for found in self._gradients:
            grads = found.grads
            if found.has_sparse:
                grads = [grad._values() if grad.is_sparse else grad for grad in grads]
            values += grads
        return values

    def _names(self) -> list[str]:
        """The names of the parameters whose gradients were looked at."""
        return [name for found in self._gradients for name in found.names()]


def nonfinite_error(places: Sequence[str], *, is_late: bool = False) -> NonFiniteError:
    """The error for gradients that are NaN or infinite at these places.

    Args:
        places: their names.
        is_late: whether they are those of the step before, which the GPU has not made.
    """
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    where = f"{places[0]}{more}"
    return NonFiniteError.of(
        given=f"a NaN or infinite gradient at {where}{' in the last step' if is_late else ''}",
        allowed="finite gradients; parameters and state are as they were before "
        f"{'it' if is_late else 'this step'}",
        todo="look at the inputs and the loss of this batch, lower lr or scale, or pass "
        "nonfinite='skip' to skip such steps",
    )
