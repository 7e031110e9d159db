"""Step 2 of the flow: T, what is done to the gradient that arrives at sigma.

model -> sites -> **T** -> virtual gradient -> update

An operator is any callable ``(g, site) -> tensor of g's shape and dtype``. Here are the identity,
the paper's :class:`RMS`, :class:`Sign`, :class:`Clip`, :class:`Normalize`, the first-order methods
on sigma (``on_sigma(momentum)``), and :func:`compose` to chain them. Operators with a state follow
the transaction of :class:`StatefulOperator`: prepare in backward, commit in step.
"""

from virtualgrad.operators.base import Operator, StatefulOperator, apply_operator, as_stateful
from virtualgrad.operators.composition import Compose, compose
from virtualgrad.operators.first_order import FirstOrder, adam, momentum, on_sigma, rmsprop, sgd
from virtualgrad.operators.rms import RMS
from virtualgrad.operators.rms_settings import RMSSettings
from virtualgrad.operators.stateless import Clip, Normalize, Sign, identity

__all__ = [
    "RMS",
    "Clip",
    "Compose",
    "FirstOrder",
    "Normalize",
    "Operator",
    "RMSSettings",
    "Sign",
    "StatefulOperator",
    "adam",
    "apply_operator",
    "as_stateful",
    "compose",
    "identity",
    "momentum",
    "on_sigma",
    "rmsprop",
    "sgd",
]
