"""The state of T in a state_dict of torch.optim.

torch.optim saves tensors per parameter, T keeps them per site. So the state of a site stands at
the first parameter that its T serves, as ``"r@fc1:linear(weight)"``: name of the tensor, key of
the site. With the first of them stand the switches that it was made with (:mod:`.switches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from virtualgrad.optim.switches import MADE_WITH, written

VERSION = 1


@dataclass(frozen=True)
class Saved:
    """The entries of a state_dict, told apart.

    Attributes:
        plain: number of a parameter -> what torch.optim keeps for it.
        operator: site -> the tensors that T keeps for it.
        parameters_at: site -> the parameter at which they stood.
        made_with: the switches of that T, as they are written.
    """

    plain: dict[Any, dict[str, Any]] = field(default_factory=dict)
    operator: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    parameters_at: dict[str, tuple[str, ...]] = field(default_factory=dict)
    made_with: list[str] = field(default_factory=list)


def add_operator_state(
    packed: dict[str, Any],
    state: Mapping[str, Mapping[str, Tensor]],
    parameters_at: Mapping[str, Sequence[str]],
    named: Sequence[tuple[str, Tensor]],
    switches: dict[str, str] | None,
) -> None:
    """Put the state of T into a state_dict.

    Args:
        packed: the state_dict that torch.optim has made.
        state: site -> the tensors that T keeps for it.
        parameters_at: site -> the parameters that its T serves.
        named: the optimizer's parameters, in the order of their numbers.
        switches: what the state was made with; None if that is not known.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in named}
    packed["virtualgrad"] = {"version": VERSION, "shapes": shapes}
    number = {name: index for index, (name, _) in enumerate(named)}
    first = {key: parameters_at[key][0] for key in state}
    owners = {key: number[name] for key, name in first.items() if name in number}
    for key, owner in owners.items():  # (a group that was taken out has none)
        entries = packed["state"].setdefault(owner, {})
        for name, tensor in state[key].items():
            entries[f"{name}@{key}"] = tensor
    if owners and switches is not None:
        entry = f"{MADE_WITH}@{written(switches)}"
        packed["state"][min(owners.values())][entry] = torch.zeros(())


def read_entries(
    state: Mapping[int, Mapping[str, Any]], named: Sequence[tuple[str, Tensor]]
) -> Saved:
    """Tell the state of T from what torch.optim keeps itself, in a checked state_dict.

    torch would cast r to the dtype of the parameter, so it must not see it.
    """
    saved = Saved()
    for index, entries in state.items():
        name, parameter = named[index]
        for entry, value in entries.items():
            kind, at, key = entry.partition("@")
            if at and kind == MADE_WITH:
                saved.made_with.append(key)
            elif at:
                tensor = value.detach().clone().to(parameter.device)
                saved.operator.setdefault(key, {})[kind] = tensor
                saved.parameters_at[key] = (name,)
            else:
                saved.plain.setdefault(index, {})[entry] = value
    return saved
