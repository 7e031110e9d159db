"""Which operators with a state an attached optimizer uses: no other one may use them meanwhile.

Their state is kept by the names of sites, which two models may share; and a step of one optimizer
would commit what the other's backward pass has prepared. An operator is free again when its
optimizer is detached or gone.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import MutableMapping

from virtualgrad.errors import OperatorError
from virtualgrad.operators import Compose, StatefulOperator
from virtualgrad.virtual import Attachment

# The id of an operator with a state -> the attachment that uses it, and keeps it alive meanwhile.
_users: MutableMapping[int, Attachment] = weakref.WeakValueDictionary()


def occupy(operator: StatefulOperator, attachment: Attachment) -> None:
    """Note that an attached optimizer uses an operator, and those that it is composed of."""
    for member in _members(operator):
        _users[id(member)] = attachment


def require_free(operator: StatefulOperator) -> None:
    """Raise if another optimizer uses T: sites of two models have the same names in its state."""
    if _first_in_use(operator) is not None:
        gc.collect()  # an optimizer that nobody holds any more may sit in a reference cycle
    member = _first_in_use(operator)
    if member is not None:
        raise OperatorError.of(
            given=f"an operator with a state, {type(member).__name__}, that another optimizer uses",
            allowed="operators with a state in one attached optimizer at a time: by the names of "
            "the sites, their states would mix",
            todo="make one for each optimizer, or call detach() on the other optimizer",
        )


def _first_in_use(operator: StatefulOperator) -> StatefulOperator | None:
    for member in _members(operator):
        attachment = _users.get(id(member))
        if attachment is not None and attachment.active:
            return member
    return None


def _members(operator: StatefulOperator) -> list[StatefulOperator]:
    """The operators that keep a state: itself, or those that it is composed of."""
    if not isinstance(operator, Compose):
        return [operator]
    return [member for part in operator.stateful for member in _members(part)]
