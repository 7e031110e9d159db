"""Checks of what a user gives to an optimizer: each error says given, allowed, next step."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from virtualgrad.errors import (
    ClaimedParameterError,
    HyperparameterError,
    ModelError,
    OperatorError,
    StateDictError,
)
from virtualgrad.virtual import Attachment

RANGES: dict[str, tuple[str, float, bool, float]] = {
    # name: what it is, lowest value, whether that value itself is allowed, first value too high
    "lr": ("alpha, the learning rate", 0.0, True, math.inf),
    "scale": ("s, the scaling coefficient", 0.0, True, math.inf),
    "rho": ("the decay of r", 0.0, True, 1.0),
    "eps": ("added to r under the root", 0.0, False, math.inf),
    "momentum": ("of the virtual gradient", 0.0, True, 1.0),
    "weight_decay": ("decoupled from the gradient", 0.0, True, math.inf),
}


def require_in_range(name: str, value: Any) -> None:
    """Raise unless a hyperparameter lies in its range."""
    meaning, low, closed, high = RANGES[name]
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number and (low <= number if closed else low < number) and number < high:
        return
    below = f" and {name} < {high:g}" if math.isfinite(high) else ", finite"
    raise HyperparameterError.of(
        given=f"{name}={value!r}",
        allowed=f"{name} ({meaning}) {'>=' if closed else '>'} {low:g}{below}",
        todo=f"choose {name} in that range",
    )


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless an option is one of its choices."""
    if value not in choices:
        raise HyperparameterError.of(
            given=f"{name}={value!r}",
            allowed=" or ".join(repr(choice) for choice in choices),
            todo=f"choose one of them for {name}",
        )


def require_batch_dim(batch_dim: Any) -> None:
    """Raise unless ``batch_dim`` is an axis, counted from the front.

    From the end it would be another one in sigma than in the inputs, which may have other axes.
    """
    if not isinstance(batch_dim, int) or isinstance(batch_dim, bool) or batch_dim < 0:
        raise HyperparameterError.of(
            given=f"batch_dim={batch_dim!r}",
            allowed="an integer >= 0: the axis of the inputs that counts samples, counted from the "
            "front",
            todo="choose 0, or 1 for time-first sequences",
        )


def require_parameters(parameters: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise for a model with nothing to train."""
    if not parameters:
        raise ModelError.of(
            given=f"{type(model).__name__}, a model without parameters",
            allowed="a torch.nn.Module with at least one parameter",
            todo="pass the model that holds the parameters",
        )


def require_some(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise where no group has a parameter; that some have none is as in torch.optim."""
    if not any(group["params"] for group in groups):
        raise ModelError.of(
            given="params= with no parameter in any group",
            allowed="at least one parameter; some of the groups may be empty",
            todo="look at what chooses the parameters, or leave out params=",
        )


def require_model(model: Any) -> None:
    """Raise where ``model.parameters()`` was passed, as other optimizers take it."""
    if not isinstance(model, nn.Module):
        raise ModelError.of(
            given=f"a {type(model).__name__} in place of the model",
            allowed="a torch.nn.Module: virtual gradients depend on ops, not on parameters alone",
            todo="pass the model itself; name some of its parameters with params=",
        )


# Parameter -> the attachment that has it. Weak both ways: it keeps nothing alive.
_claims: MutableMapping[Tensor, weakref.ref[Attachment]] = WeakTensorKeyDictionary()


def claim(parameters: Iterable[tuple[str, Tensor]], attachment: Attachment) -> None:
    """Note that an optimizer has these parameters."""
    for _, parameter in parameters:
        _claims[parameter] = weakref.ref(attachment)


def require_unclaimed(
    parameters: Iterable[tuple[str, Tensor]], own: Attachment | None = None
) -> None:
    """Raise if another optimizer with virtual gradients has one of the parameters already."""
    wanted = list(parameters)
    if first_claimed(wanted, own) is not None:
        gc.collect()  # an optimizer that nobody holds any more may sit in a reference cycle
    name = first_claimed(wanted, own)
    if name is not None:
        raise ClaimedParameterError.of(
            given=f"parameter {name!r}, which another optimizer with virtual gradients has already",
            allowed="one such optimizer per parameter",
            todo="call detach() on the other optimizer, or name disjoint params= for each",
        )


def first_claimed(wanted: list[tuple[str, Tensor]], own: Attachment | None) -> str | None:
    """The first of some parameters that another attached optimizer has, by name."""
    for name, parameter in wanted:
        reference = _claims.get(parameter)
        attachment = None if reference is None else reference()
        if attachment is not None and attachment.active and attachment is not own:
            return name
    return None


def require_operator(operator: Any) -> None:
    """Raise unless T can be called; a class can, but makes an operator then, not T(g)."""
    if not callable(operator) or isinstance(operator, type):
        name = getattr(operator, "__name__", None)
        raise OperatorError.of(
            given=f"operator={operator!r}",
            allowed="a callable (g, site) -> tensor of g's shape",
            todo=f"pass {name}() for an operator of this class"
            if name
            else "pass one of virtualgrad.operators, or a function of your own",
        )


def require_predicate(where: Any) -> None:
    """Raise unless ``where`` can be asked."""
    if where is not None and not callable(where):
        raise HyperparameterError.of(
            given=f"where={where!r}",
            allowed="a function of a site that returns True or False, or None for all sites",
            todo="pass such a function, for example virtualgrad.weights_only",
        )


def numbered(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same with parameters numbered; sharded checkpoints call them by their names."""
    groups, state = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        return dict(state_dict)
    called = [called for group in groups for called in group.get("params", ())]
    number = {name: index for index, name in enumerate(called)}
    return {
        **state_dict,
        "state": {number.get(key, key): state[key] for key in state},
        "param_groups": [
            {**group, "params": [number[name] for name in group.get("params", ())]}
            for group in groups
        ],
    }


def require_fitting_state(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raise unless a state_dict was saved for this model by this kind of optimizer."""
    saved = state_dict.get("param_groups")
    if not isinstance(saved, list) or not isinstance(state_dict.get("state"), Mapping):
        raise _unfit("no 'state' and 'param_groups'", "a state_dict of this optimizer")
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        given = [len(group["params"]) for group in saved]
        ours = [len(group["params"]) for group in groups]
        raise _unfit(f"groups of {given} parameters", f"groups of {ours}")
    for theirs, mine in zip(saved, groups, strict=True):
        missing = sorted(set(mine) - set(theirs) - {"param_names"})
        if missing:
            raise _unfit(f"no {missing[0]!r} in param_groups", f"groups with {sorted(mine)}")
        for other, name in zip(theirs.get("param_names", ()), mine["param_names"], strict=False):
            if other != name:
                raise _unfit(f"a state of parameter {other!r}", f"{name!r} in its place")
    count = sum(len(group["params"]) for group in groups)
    strange = [index for index in state_dict["state"] if index not in range(count)]
    if strange:
        raise _unfit(f"a state of parameter number {strange[0]}", f"numbers below {count}")
    _require_fitting_shapes(state_dict, groups)


def _require_fitting_shapes(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    shapes = state_dict.get("virtualgrad", {}).get("shapes", {})
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            saved = tuple(shapes.get(name, parameter.shape))
            if saved != tuple(parameter.shape):
                raise _unfit(
                    f"{name!r} of shape {saved}", f"its shape {tuple(parameter.shape)} here"
                )


def _unfit(given: str, allowed: str) -> StateDictError:
    return StateDictError.of(
        given=f"a state_dict with {given}",
        allowed=allowed,
        todo="load the state_dict of the same optimizer on the same model; nothing was changed",
    )
