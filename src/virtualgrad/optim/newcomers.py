"""Parameters that come to a model after its optimizer, and that no step moves.

torch.optim does not know of them, and says nothing. An optimizer that holds the model can look; but
to walk through a large model takes as long as a small step, so it looks now and then.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from virtualgrad.optim import checks
from virtualgrad.virtual import Attachment

EVERY = 64  # steps; at first more often: the 1st, 2nd, 4th, 8th, ...


class Newcomers:
    """Tells once of parameters that were not there when the optimizer was made."""

    def __init__(self, model: nn.Module) -> None:
        self._known: set[int] = set()
        self._steps = 0
        self._has_warned = False
        self.know(model.parameters())

    def know(self, parameters: Iterable[Tensor]) -> None:
        """Take these parameters for ones that the user has thought of."""
        self._known.update(id(parameter) for parameter in parameters)

    def look(self, model: nn.Module, attachment: Attachment) -> None:
        """Count a step, and look for newcomers if it is time to (not in a compiled step)."""
        if torch.compiler.is_compiling() or self._has_warned:
            return
        self._steps += 1
        is_power_of_two = self._steps & (self._steps - 1) == 0
        # Shards are replaced by other tensors in every pass.
        if (is_power_of_two or self._steps % EVERY == 0) and not attachment.intercept.is_sharded:
            self._warn(self._in(model, attachment), type(model).__name__)

    def _in(self, model: nn.Module, attachment: Attachment) -> list[str]:
        """The names of the newcomers that are to be trained, and by no other optimizer of ours."""
        if not self._is_anyone_new(model):
            return []
        return [
            name
            for name, parameter in model.named_parameters()
            if id(parameter) not in self._known
            and parameter.requires_grad
            and checks.first_claimed([(name, parameter)], attachment) is None
        ]

    def _is_anyone_new(self, model: nn.Module) -> bool:
        """Whether there are newcomers; model.parameters() makes names, which takes much longer."""
        modules, seen = [model], {id(model)}
        for module in modules:
            if any(id(p) not in self._known for p in module._parameters.values() if p is not None):
                return True
            children = [each for each in module._modules.values() if each is not None]
            modules += [each for each in children if id(each) not in seen]
            seen.update(id(each) for each in children)
        return False

    def _warn(self, names: list[str], title: str) -> None:
        if not names:
            return
        self._has_warned = True
        shown = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"{shown} {'has' if len(names) == 1 else 'have'} come to {title} since its optimizer "
            "was made, which does not move them. Have them trained with "
            "optimizer.add_param_group({'params': ...}), unless another optimizer does",
            stacklevel=6,
        )
