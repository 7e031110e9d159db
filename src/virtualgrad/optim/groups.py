"""Parameter groups: from any form that torch.optim takes to groups of (name, parameter).

Sites know parameters by their names in the model, so a group must, too. And T finds the numbers of
a site by a number of its group that stays, whatever users do to the list ``param_groups``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from virtualgrad.errors import ModelError
from virtualgrad.optim import checks

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def named_groups(params: Params | None, named: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Groups of (name, parameter), whatever form the user gave them in.

    Args:
        params: as the user gave them; None for one group of all.
        named: name -> parameter of the model.
    """
    if params is None:
        return [{"params": list(named.items())}]
    given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if not given:
        raise ModelError.of(
            given="empty params=", allowed="at least one parameter", todo="leave out params="
        )
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    names = {id(parameter): name for name, parameter in named.items()}
    return [_named_group(group, names) for group in groups]


def _named_group(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """A group with names; torch.optim takes an empty one for a group without, unless it is told."""
    entries = _named_entries(group, names)
    return {**group, "params": entries} | ({} if entries else {"param_names": []})


def _named_entries(group: Mapping[str, Any], names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    """The parameters of a group, by the model's names; names that the user gave do not count."""
    if "params" not in group:
        raise ModelError.of(
            given=f"a parameter group with {sorted(group)} only",
            allowed="a dict with 'params'",
            todo="add the parameters of the group under 'params'",
        )
    entries = group["params"]
    entries = [entries] if isinstance(entries, Tensor) else list(entries)
    tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    for position, tensor in enumerate(tensors):
        if id(tensor) not in names:
            raise ModelError.of(
                given=f"entry {position} of params=, which is no parameter of the model",
                allowed="parameters of the model",
                todo="take them from model.parameters() or model.named_parameters()",
            )
    return [(names[id(tensor)], tensor) for tensor in tensors]


class Numbering:
    """Every parameter group has a number for good: T and compiled passes find it by that.

    The place in ``param_groups`` may change: users reorder the list, take groups out, or put new
    dicts in place of the old ones, as torch's own ``load_state_dict`` does.

    Attributes:
        groups: number -> the group. One that was taken out stays: its layers still have a T.
        number: name of a parameter -> the number of its group.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        self.number: dict[str, int] = {}
        self._seen: list[dict[str, Any]] = []

    def renew(self, groups: Sequence[dict[str, Any]]) -> None:
        """Look at the groups as they are now; without a change it costs a comparison for each.

        Raise where the list of a group has become longer or shorter: T knows parameters by name.
        """
        for group in groups:
            params, names = group["params"], group.get("param_names", ())
            if len(params) != len(names):
                raise ModelError.of(
                    given=f"a parameter group with {len(params)} parameters and {len(names)} names",
                    allowed="a name for each parameter: T finds the settings of a layer by it",
                    todo="add parameters by optimizer.add_param_group({'params': ...}); those that "
                    "are not to be moved may stay, with requires_grad_(False)",
                )
        if len(groups) == len(self._seen) and all(map(operator.is_, groups, self._seen)):
            return
        self._seen = list(groups)
        new = [group for group in groups if not _holds(self.groups, group)]
        for group in new:
            self._take(group)

    def _take(self, group: dict[str, Any]) -> None:
        """Have a number for a new dict: that of one with these parameters that is gone, or another.

        Not by the names: a layer in whose place there is a new one has left them to that.
        """
        for number, known in enumerate(self.groups):
            same = len(known["params"]) == len(group["params"]) and all(
                map(operator.is_, known["params"], group["params"])
            )
            if same and not _holds(self._seen, known):
                self.groups[number] = group
                return
        self.groups.append(group)
        self.number |= dict.fromkeys(group["param_names"], len(self.groups) - 1)


def _holds(groups: Iterable[dict[str, Any]], group: dict[str, Any]) -> bool:
    """Whether a group is among others: itself, for equality would compare tensors."""
    return any(group is other for other in groups)


def summary(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each group: its size and its numbers."""
    lines = []
    for number, group in enumerate(groups):
        numbers = ", ".join(f"{n}={float(group[n]):g}" for n in checks.RANGES if n in group)
        lines.append(f"  group {number}: {len(group['params'])} tensors, {numbers}")
    return lines
