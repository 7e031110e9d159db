"""The user's model: behind wrappers, with its parameters, and whether it can be attached to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from virtualgrad.errors import ModelError

BINDING = "_virtualgrad_attachment"
"""What the classes that an attachment gives to modules call it."""


def is_attached(module: object) -> bool:
    """Whether an object is a module to which an attachment has given a class."""
    return hasattr(type(module), BINDING)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel and torch.compile's wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def require_attachable(model: nn.Module) -> None:
    """Raise for models whose forward cannot be seen, or is run by copies of them."""
    for name, module in model.named_modules():
        where = f"{type(module).__name__} at {name or 'the top of the model'!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError.of(
                given=where,
                allowed="modules that run in Python: a ScriptModule hides its ops",
                todo="pass the model before torch.jit.script or torch.jit.trace; torch.compile "
                "works on it",
            )
        if isinstance(module, nn.DataParallel):
            raise ModelError.of(
                given=where,
                allowed="modules that run themselves: DataParallel runs copies of them",
                todo="use torch.nn.parallel.DistributedDataParallel",
            )


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> parameter of the unwrapped model; a tied parameter once, under its first name."""
    parameters: dict[str, Tensor] = dict(unwrap(model).named_parameters())
    for name, parameter in parameters.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise ModelError.of(
                given=f"the uninitialized parameter {name!r} of a lazy module",
                allowed="parameters with a shape",
                todo="run one batch through the model before making the optimizer",
            )
    return parameters
