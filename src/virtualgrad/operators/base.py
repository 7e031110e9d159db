"""The contract of an operator T, and the transaction that its state follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from virtualgrad.errors import OperatorError, ShapeChangedError, StateDictError
from virtualgrad.operators.finite import nonfinite_indices
from virtualgrad.sites import Site

SiteState = dict[str, Tensor]
"""Named tensors that an operator keeps for one site."""

TakeBack = Callable[[], None]
Commit = Callable[[], TakeBack]
"""A commit that a GPU may not make; what it returns takes back what the host has noted of it."""


class Operator(Protocol):
    """T: takes g = dJ/dsigma and the site, returns T(g) with g's shape and dtype."""

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return T(g)."""
        ...


class StatefulOperator(ABC):
    """An operator with a state per site that changes in steps, all sites together or none.

    Calls during the backward pass only prepare the new state; :meth:`commit` makes it the state
    (an optimizer does so in ``step()``, :func:`virtualgrad.virtual_grad` at its end), and
    :meth:`rollback` forgets it. So a step that is skipped, or fails halfway, loses nothing.

    Attributes:
        state: site key -> named tensors, as of the last commit.
        loss_scale: the factor of the loss, where the operator knows what to do with it; None where
            it is handed g without that factor.
        ranks: the processes that share a batch, if there are several.
        switches: what the meaning of the state depends on, name -> value. They are saved with it,
            and an optimizer whose operator has others refuses to load it.
    """

    loss_scale: float | None = None
    ranks: Any = None
    switches: Mapping[str, object] = MappingProxyType({})

    def __init__(self) -> None:
        self.state: dict[str, SiteState] = {}

    @abstractmethod
    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return T(g), and prepare the new state of the site."""

    def at(self, site: Site, sigma: Tensor) -> Operator:
        """The operator with its hyperparameters at a site read now, in the forward pass.

        A compiled backward pass has no host to ask for them; nor may it ask how g lies in memory,
        but that is known of sigma.
        """
        return self

    def require_loadable(self, state: dict[str, SiteState]) -> None:  # noqa: B027 - most is
        """Raise if a saved state cannot become the state now; nothing has changed then."""

    def begin_graph(self, *, first: bool = False) -> None:  # noqa: B027 - few count compiled passes
        """The compiled passes that begin from now on belong to another graph, at the same sites.

        ``first``: and none is under way that has begun before, nor is anything prepared.
        """

    def begin_reduction(self) -> None:  # noqa: B027 - most operators have nothing to reduce
        """Before a commit: begin to make what was prepared that of all ranks, without waiting."""

    def reduce(self) -> None:  # noqa: B027 - as above
        """Wait for that, if it was begun: then what was prepared is that of all ranks."""

    @abstractmethod
    def commit(self) -> None:
        """Make the prepared state the state."""

    @abstractmethod
    def rollback(self) -> None:
        """Forget the prepared state."""

    def guarded_commit(self, guard: Any) -> Commit | None:
        """What commits if the GPU finds that all numbers of this step are finite.

        The host does not know, and goes on as behind a commit; what that returns takes back what
        the host has noted, if they were not. None: it has to know.

        Args:
            guard: of the step (:class:`~virtualgrad.operators.guard.Guard`).
        """
        return None

    def plain_sites(self) -> dict[str, Any] | None:
        """What is kept at each site, where a step in C++ may commit it; else None.

        (:mod:`virtualgrad.optim.native_steps`; :meth:`note_commit` is to follow.)
        """
        return None

    def note_commit(self, compiled: Sequence[Any] = ()) -> None:  # noqa: B027 - most count none
        """Be told that all was committed by others, and what compiled passes keep at sites."""

    def witnesses(self) -> list[tuple[str, Tensor]]:
        """(site key, a tensor that is finite if every g there was), in the order of backward."""
        return []

    def counts(self) -> list[tuple[str, Tensor]]:
        """(site key, a tensor that is finite unless compiled passes have counted a graph twice)."""
        return []

    def nonfinite_sites(self) -> list[str]:
        """Keys of the sites whose prepared state shows a NaN or infinite g, first one first."""
        found = self.witnesses()
        return [found[index][0] for index in nonfinite_indices([tensor for _, tensor in found])]

    def sites_counted_twice(self) -> list[str]:
        """Keys of the sites that two compiled passes through one graph have reached.

        Asked only where a prepared state is not finite, as it is there.
        """
        return []

    def has_prepared(self) -> bool:
        """Whether a backward pass has prepared a new state since the last commit."""
        return False


class _Stateless(StatefulOperator):
    """Any other operator, as one whose state is always empty."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        return self.operator(g, site)

    def commit(self) -> None:
        pass

    def guarded_commit(self, guard: Any) -> Commit:
        return lambda: self.rollback  # of nothing

    def plain_sites(self) -> dict[str, Any]:
        return {}

    def rollback(self) -> None:
        pass


def as_stateful(operator: Operator) -> StatefulOperator:
    """The operator itself if it keeps a state, or else one that adds an empty state to it."""
    return operator if isinstance(operator, StatefulOperator) else _Stateless(operator)


def apply_operator(operator: Operator, g: Tensor, site: Site) -> Tensor:
    """Return T(g), or an error that names the site if it does not fit."""
    result = operator(g, site)
    if not isinstance(result, Tensor):
        raise OperatorError.of(
            given=f"operator {_name(operator)} returned {type(result).__name__} at {site.key}",
            allowed="a tensor with the shape and dtype of g",
            todo="return a tensor from the operator",
        )
    if result.shape != g.shape or result.dtype != g.dtype or result.device != g.device:
        raise OperatorError.of(
            given=f"operator {_name(operator)} returned {_describe(result)} at {site.key}",
            allowed=f"what g has there, {_describe(g)}",
            todo="keep shape, dtype and device of g inside the operator",
        )
    return result


def require_shape(key: str, found: Sequence[int], kept: Sequence[int], todo: str) -> None:
    """Raise if the state kept for a site does not fit the sigma that was found there now."""
    if tuple(found) != tuple(kept):
        raise ShapeChangedError.of(
            given=f"sigma at {key} needs a state of shape {tuple(found)}",
            allowed=f"the shape of the state it has, {tuple(kept)}",
            todo=todo,
        )


def require_names(key: str, tensors: SiteState, *, complete: bool, of: str) -> None:
    """Raise if a saved state of a site is not one that an operator keeps."""
    if not complete:
        raise StateDictError.of(
            given=f"a saved state of {key} with {', '.join(tensors) or 'nothing'}",
            allowed=f"what {of} keeps there",
            todo="load it into an optimizer with the operator that it was saved with",
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _name(operator: object) -> str:
    return getattr(operator, "__name__", type(operator).__name__)
