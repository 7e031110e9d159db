"""Encapsulation 1, what to remember: the layers that can run again as they were run before.

:mod:`.remembered` runs them; here it is decided which layers are plain enough. What would have to
be looked at again in each pass (a parameter behind a view, a tensor that is new each time) is not
remembered.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from virtualgrad.virtual.calls import Call, Fused
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.remembered import Layer, LeftOut, Part, behind_input
from virtualgrad.virtual.site_of_call import split_key
from virtualgrad.virtual.tracking import Pass

SITUATIONS_REMEMBERED = 10_000


class Memories:
    """Layer -> how it was run.

    Attributes:
        layers: (torch function, path of the module, id of the weight) -> the layer. Read for
            every op with parameters.
    """

    def __init__(self, tracked: TrackedParameters) -> None:
        self.layers: dict[tuple[Any, str | None, int], LeftOut | Layer] = {}
        self._tracked = tracked
        self._situations = 0  # of all layers

    def clear(self) -> None:
        """Forget all layers: parameters have come, or too much is remembered."""
        self.layers.clear()
        self._situations = 0

    def add_left_out(self, call: Call, path: str | None) -> None:
        """Remember a layer at which T does not act, if ``where`` was asked for all parameters."""
        asked = [use.tensor for use in call.uses]
        arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
        parameters = [(at, value) for at, value in arguments if isinstance(value, nn.Parameter)]
        if len(asked) == len(parameters) and all(isinstance(p, nn.Parameter) for p in asked):
            position, name = call.rule.weight
            weight = call.args[position] if len(call.args) > position else call.kwargs.get(name)
            key, number = split_key(call.key)
            given = (call.bound.get("weight"), call.bound.get("bias"))
            left_out = LeftOut(key, parameters, self._tracked.names, *given)
            known = self.layers.get((call.function, path, id(weight)))
            if isinstance(known, LeftOut) and known.is_same(call.args, call.kwargs):
                left_out = known
            left_out.numbers.add(number)
            self._add(call.function, path, weight, left_out)

    def add_layer(
        self,
        call: Call,
        path: str | None,
        fused: Fused,
        parts: list[Part],
        *,
        current: Pass,
        batch_dim: int,
    ) -> None:
        """Remember how a layer was run, if it is one that runs as plainly the next time."""
        if not call.args or isinstance(call.args[0], nn.Parameter):
            return
        tensors = [t for _, t in behind_input(call.args, call.kwargs) if isinstance(t, Tensor)]
        if not all(isinstance(t, nn.Parameter) or _is_lasting(call, t) for t in tensors):
            return
        if any(isinstance(value, list) for value in call.bound.values()):
            return  # it may be changed in place, and be the same list still
        key, number = split_key(call.key)
        position, name = call.rule.weight
        weight = call.args[position] if len(call.args) > position else call.kwargs.get(name)
        if not isinstance(weight, Tensor):
            return
        if self._situations >= SITUATIONS_REMEMBERED:  # inputs of ever new sizes
            self.clear()
        layer = Layer.of(key, call.args, call.kwargs, fused.again(), weight)
        known = self.layers.get((call.function, path, id(weight)))
        if isinstance(known, Layer) and known.is_same(call.args, call.kwargs):
            layer = known
        elif not parts:  # left out by where: its op runs as it is from now on
            return
        x = call.args[0]
        situation = (number, weight.shape, x.shape, x.dtype, current.batch_size, batch_dim)
        self._situations += situation not in layer.parts
        layer.parts[situation] = parts
        self._add(call.function, path, weight, layer)

    def _add(self, function: Any, path: str | None, weight: Any, memory: LeftOut | Layer) -> None:
        if isinstance(weight, nn.Parameter) and id(weight) in self._tracked.names:
            self.layers[function, path, id(weight)] = memory


def _is_lasting(call: Call, tensor: Tensor) -> bool:
    """Whether a tensor that is no parameter is the same each time, as running statistics are."""
    return call.rule.op == "batch_norm" and not tensor.requires_grad
