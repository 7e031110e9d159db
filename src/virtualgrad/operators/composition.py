"""Operators one after the other, as one operator: its state is that of its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from virtualgrad.errors import OperatorError
from virtualgrad.operators.base import (
    Operator,
    SiteState,
    StatefulOperator,
    apply_operator,
    require_names,
)
from virtualgrad.sites import Site


class _Chain:
    """Operators one after the other, the rightmost first."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self.operators = operators

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        for operator in reversed(self.operators):
            g = apply_operator(operator, g, site)
        return g


class Compose(StatefulOperator):
    """compose(A, B, C)(g) = A(B(C(g))): the rightmost acts first, as in the notation A B C g."""

    def __init__(self, *operators: Operator) -> None:
        if not operators:
            raise OperatorError.of(
                given="compose() of no operators",
                allowed="one operator or more",
                todo="use operators.identity for no change",
            )
        self.operators = operators

    @property
    def ranks(self) -> Any:
        """The processes that share a batch."""
        return next((operator.ranks for operator in self.stateful), None)

    @ranks.setter
    def ranks(self, ranks: Any) -> None:
        for operator in self.stateful:
            operator.ranks = ranks

    @property
    def switches(self) -> dict[str, object]:  # type: ignore[override] # read only, as a property
        """Those of all members: names carry the position of the member, as in ``"0.stale"``."""
        return {
            f"{position}.{name}": value
            for position, operator in enumerate(self.stateful)
            for name, value in operator.switches.items()
        }

    @property
    def stateful(self) -> list[StatefulOperator]:
        """The members that keep a state, in order."""
        return [o for o in self.operators if isinstance(o, StatefulOperator)]

    @property
    def state(self) -> dict[str, SiteState]:
        """State of all members: names carry the position of the member, as in ``"0.r"``."""
        merged: dict[str, SiteState] = {}
        for position, operator in enumerate(self.stateful):
            for key, tensors in operator.state.items():
                names = {f"{position}.{name}": tensor for name, tensor in tensors.items()}
                merged.setdefault(key, {}).update(names)
        return merged

    @state.setter
    def state(self, merged: dict[str, SiteState]) -> None:
        self.require_loadable(merged)
        for operator, state in self._split(merged):
            operator.state = state

    def require_loadable(self, state: dict[str, SiteState]) -> None:
        """Ask every member for its own; what is nobody's is of another operator."""
        parts = self._split(state)
        for key, tensors in state.items():
            claimed = sum(len(own.get(key, {})) for _, own in parts)
            require_names(key, tensors, complete=claimed == len(tensors), of="this composition")
        for operator, own in parts:
            operator.require_loadable(own)

    def _split(
        self, merged: dict[str, SiteState]
    ) -> list[tuple[StatefulOperator, dict[str, SiteState]]]:
        """The members, each with its own of a merged state."""
        found = []
        for position, operator in enumerate(self.stateful):
            prefix = f"{position}."
            own = {
                key: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                for key, tensors in merged.items()
            }
            found.append((operator, {key: tensors for key, tensors in own.items() if tensors}))
        return found

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return the composition of the members on g."""
        return _Chain(self.operators)(g, site)

    @property
    def epoch(self) -> int | None:
        """Commits and rollbacks so far; None where a member takes every pass for another batch."""
        epochs: list[Any] = [getattr(operator, "epoch", None) for operator in self.stateful]
        return None if not epochs or None in epochs else sum(epochs)

    def again(self, g: Tensor, earlier: Tensor, site: Site) -> Tensor:
        """Return T(g) of a further pass through a graph that has brought ``earlier`` already.

        Each member gets what those before it make of the two. What was earlier is then counted:
        with the r of before it becomes what it was, with r updated first what it would be now.
        """
        for operator in reversed(self.operators):
            if isinstance(operator, StatefulOperator):
                g = operator.again(g, earlier, site)  # type: ignore[attr-defined]
                earlier = operator.same(earlier, site)  # type: ignore[attr-defined]
            else:
                g, earlier = (apply_operator(operator, one, site) for one in (g, earlier))
        return g

    def same(self, g: Tensor, site: Site) -> Tensor:
        """Return T(g) of a g that is counted already; nothing is prepared."""
        for operator in reversed(self.operators):
            if isinstance(operator, StatefulOperator):
                g = operator.same(g, site)  # type: ignore[attr-defined]
            else:
                g = apply_operator(operator, g, site)
        return g

    def at(self, site: Site, sigma: Tensor) -> Operator:
        """The composition of the members at a site."""
        return _Chain(
            [o.at(site, sigma) if isinstance(o, StatefulOperator) else o for o in self.operators]
        )

    def begin_graph(self, *, first: bool = False) -> None:
        """Tell every member."""
        for operator in self.stateful:
            operator.begin_graph(first=first)

    def begin_reduction(self) -> None:
        """Begin with every member."""
        for operator in self.stateful:
            operator.begin_reduction()

    def reduce(self) -> None:
        """Wait for every member."""
        for operator in self.stateful:
            operator.reduce()

    def commit(self) -> None:
        """Commit every member."""
        for operator in self.stateful:
            operator.commit()

    def rollback(self) -> None:
        """Roll back every member."""
        for operator in self.stateful:
            operator.rollback()

    def has_prepared(self) -> bool:
        """Whether any member has."""
        return any(operator.has_prepared() for operator in self.stateful)

    def sites_counted_twice(self) -> list[str]:
        """Those of all members."""
        return [key for operator in self.stateful for key in operator.sites_counted_twice()]

    def witnesses(self) -> list[tuple[str, Tensor]]:
        """Those of all members."""
        return [witness for operator in self.stateful for witness in operator.witnesses()]


def compose(*operators: Operator) -> Compose:
    """Chain operators: ``compose(A, B, C)`` makes A(B(C(g))) of g."""
    return Compose(*operators)
