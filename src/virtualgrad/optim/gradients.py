"""The gradients that a step finds; each parameter is asked once, for the check and the update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class GroupGradients(NamedTuple):
    """The parameters of a group that have a gradient, and the gradients.

    Attributes:
        group: the parameter group.
        params: those of its parameters.
        grads: their gradients, one each.
        has_sparse: whether some are sparse.
    """

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    has_sparse: bool

    def names(self) -> list[str]:
        """The names of the parameters."""
        return names_of(self.group, self.params)


def names_of(group: dict[str, Any], params: Iterable[Tensor]) -> list[str]:
    """The names of parameters of a group, of which others may have taken out some since."""
    pairs = zip(group["params"], group["param_names"], strict=False)
    known = {id(parameter): name for parameter, name in pairs}
    return [known.get(id(parameter), "a parameter that has left") for parameter in params]


def gradients_of(groups: Iterable[dict[str, Any]]) -> list[GroupGradients]:
    """The gradients of all groups that have some."""
    found = [_gradients_of_one(group) for group in groups]
    return [each for each in found if each.grads]


def _gradients_of_one(group: dict[str, Any]) -> GroupGradients:
    params, grads, has_sparse = [], [], False
    for parameter in group["params"]:
        grad = parameter.grad
        if grad is not None:
            params.append(parameter)
            grads.append(grad)
            has_sparse = has_sparse or grad.is_sparse
    return GroupGradients(group, params, grads, has_sparse)
