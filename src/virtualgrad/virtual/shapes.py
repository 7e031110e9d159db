"""Encapsulation 1, the shape of sigma before the op has run for good.

``where`` is asked about a site, of which sigma's shape is a part, and its answer decides how the op
runs. So it has to be known first; once per site, as the answer is remembered.
"""

from __future__ import annotations

from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.ops import hold_fixed


def shape_of(call: Call) -> tuple[int, ...]:
    """The shape of the output of a call, which leaves no trace: no graph, no side effect.

    (Of a tensor that is held fixed autocast keeps no copy either; it does of a weight.)
    """
    if call.rule.in_place:
        return tuple(call.args[0].shape)
    if call.rule.pull_back is not None:  # a norm, as large as its input
        return tuple(call.bound["input"].shape)
    args, kwargs = hold_fixed(call.args, call.kwargs, lambda tensor: True)
    return tuple(call.function(*args, **kwargs).shape)
