"""The switches with which a saved state of T was made, and what happens where others are set now.

Numbers such as ``scale`` travel in the parameter groups; switches are those of the optimizer that
is there. So a state_dict says with which ones its r was made, and a load compares:

* what gives r its meaning is **refused** if it differs: ``per_sample`` and ``loss_reduction`` (the
  unit of r: the same number would be another step size), ``share_positions`` (its shape), and
  whatever an operator of one's own says of itself;
* ``stale`` and ``where`` may differ, with a **warning**: every r is what it would have been. But
  steps are others, and a site that ``where`` did not choose before begins with r = 0.

They stand in an entry of the state, ``"made_with@per_sample=True, stale=False"``, whose value does
not matter. Tools that rebuild a state_dict (torch.distributed.checkpoint) keep tensors of the
state, and those of no dimension, as Adam's ``step``, wherever they lie; nothing else of ours. In
the name it can be read off a sharded checkpoint's metadata, before anything is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from virtualgrad.errors import StateDictError
from virtualgrad.operators import StatefulOperator
from virtualgrad.sites import Where, every_linear_site

MADE_WITH = "made_with"
"""What stands in place of the name of a tensor, before the @."""

MAY_DIFFER = {
    "stale": "r is the same, but T divides by it at another moment of the step",
    "where": "sites that were left out before begin with r = 0, and r of others is not used",
}


def switches_of(operator: StatefulOperator, where: Where | None) -> dict[str, str]:
    """Name -> value, as they are saved.

    A function is known by its name, which is all that can be saved of it.
    """
    chosen = where or every_linear_site
    name = getattr(chosen, "__qualname__", type(chosen).__qualname__)
    found = {name: str(value) for name, value in operator.switches.items()}
    return {**found, "where": name}


def written(switches: dict[str, str]) -> str:
    """The switches as they stand behind the @ of an entry."""
    return ", ".join(f"{name}={value}" for name, value in switches.items())


def compare(saved: Iterable[str], switches: dict[str, str]) -> None:
    """Raise, or warn, if a state was made with other switches; one that is not named is not known.

    Args:
        saved: as :func:`written` has written them.
        switches: those of the optimizer that is to take the state.
    """
    pairs = [pair.partition("=") for entry in saved for pair in entry.split(", ")]
    differing = [(n, value) for n, _, value in pairs if switches.get(n, value) != value]
    kinds = {name: name.rpartition(".")[2] for name, _ in differing}  # a member's is "1.stale"
    for name, value in differing:
        if kinds[name] not in MAY_DIFFER:
            raise _refusal(name, value, switches[name])
    for name, value in differing:
        warnings.warn(
            f"the state_dict was made with {name}={value}, this optimizer has "
            f"{name}={switches[name]}: {MAY_DIFFER[kinds[name]]}",
            stacklevel=3,
        )


def _refusal(name: str, theirs: str, ours: str) -> StateDictError:
    return StateDictError.of(
        given=f"a state_dict made with {name}={theirs}",
        allowed=f"one made with {name}={ours}, as this optimizer is: else r means something else",
        todo=f"make the optimizer with {name}={theirs}, or do not load its state, and r begins "
        "anew; nothing was changed",
    )
