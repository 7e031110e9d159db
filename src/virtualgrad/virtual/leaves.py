"""Encapsulation 1, layers of torch.nn: what their forward calls is known, and need not be watched.

A torch function mode costs time at every op, most of all at those that torch has written in Python,
such as batch norm. So a layer that can run as it was run before (:mod:`.memories`) is not watched:
it goes straight to its op, or, where T leaves it out, runs its own forward with the mode off. Nor
is a layer without parameters, such as ReLU, in an nn.Sequential: all that its op meets is its
input. (By itself in the forward of a module it is watched: it keeps the class by which users know
it, and with it a forward that knows nothing of us.) In an nn.Sequential such layers, of both kinds,
are not even called: where a call would be their forward and no more, that is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as of_all

Behind = Callable[[Any], tuple[Any, ...] | None]
"""A layer -> what its op takes behind the input, as the layer passes it; None: ask its forward."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the forward of a class of layers does.

    Attributes:
        layer: the class.
        name: of its one op with parameters, in torch.nn.functional.
        function: that op.
        behind_input: what it takes there, if forward does nothing else; else None.
        count: what forward does beside, if anything.
        forward: of the class, as torch has written it.
        inner: the method in which a convolution's forward calls the op; None for others.
    """

    layer: type[nn.Module]
    name: str
    function: Any
    behind_input: Behind | None
    count: Callable[[Any], None] | None
    forward: Any
    inner: Any

    @classmethod
    def of(
        cls,
        layer: type[nn.Module],
        name: str,
        behind_input: Behind | None = None,
        count: Callable[[Any], None] | None = None,
    ) -> Leaf:
        """What the forward of a class does, with the methods that do it now."""
        inner = getattr(layer, "_conv_forward", None)
        return cls(layer, name, vars(F)[name], behind_input, count, layer.forward, inner)

    @property
    def is_norm(self) -> bool:
        """Whether the op is a norm."""
        return self.name.endswith("_norm")

    def is_all_of(self, module: nn.Module) -> bool:
        """Whether a layer calls this op, still torch's own, on its parameters, and does no more.

        Others may have put an op or a method of theirs in its place, on the class or on the layer;
        weight or bias may be a buffer, or made of other parameters; a convolution may pad first.
        (Asked at every run: look-ups only.)
        """
        if vars(F).get(self.name) is not self.function or self.layer.forward is not self.forward:
            return False
        parameters = module._parameters
        if "weight" not in parameters or "bias" not in parameters:
            return False
        if self.inner is None:
            return True
        own = vars(module)
        return (
            own.get("padding_mode") == "zeros"
            and "_conv_forward" not in own
            and type(module)._conv_forward is self.inner  # type: ignore[attr-defined]
        )


@dataclass(frozen=True, slots=True)
class BareLeaf:
    """What the forward of a class of layers without parameters does: one op on its input.

    Attributes:
        forward: of the class, as torch has written it.
        place: where it finds the op.
        name: of the op there; None if there is none.
        function: that op.
    """

    forward: Any
    place: Any
    name: str | None
    function: Any

    @classmethod
    def of(cls, layer: type[nn.Module], place: Any, name: str | None) -> BareLeaf:
        """What the forward of a class does, with the methods that do it now."""
        return cls(layer.forward, place, name, None if name is None else getattr(place, name))

    def is_all_of(self, layer: nn.Module) -> bool:
        """Whether a call of a layer calls the op, all still torch's own, and does no more.

        Others may have put theirs in their place, on a class or on the layer, or hooks beside.
        """
        return (
            type(layer).forward is self.forward
            and (self.name is None or getattr(self.place, self.name) is self.function)
            and is_called_plainly(layer)
        )


def bare_leaf_of(layer: nn.Module) -> BareLeaf | None:
    """What the call of a layer does, if that is one op on its input and no more; else None."""
    leaf = BARE_LEAVES.get(type(layer))
    return leaf if leaf is not None and leaf.is_all_of(layer) else None


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call of a module is its forward and no more, as long as there are no hooks on all.

    No hooks of its own, nothing compiled, and nothing that others have put in the way.
    """
    own, kind = vars(module), type(module)
    return (
        kind.__call__ is CALL
        and kind._call_impl is CALL_IMPL
        and not own["_forward_hooks"]
        and not own["_forward_pre_hooks"]
        and not own["_backward_hooks"]
        and not own["_backward_pre_hooks"]
        and own.get("_compiled_call_impl") is None
        and "forward" not in own
        and "_call_impl" not in own
    )


def is_sequence(forward: Any) -> bool:
    """Whether a forward is that of nn.Sequential, still torch's own: one module after the other."""
    return forward is SEQUENCE


def may_skip_calls() -> bool:
    """Whether modules that are called plainly may be run by their forward.

    There are no hooks that torch runs beside every module, and nobody writes down who calls whom.
    """
    return not (
        torch.autograd.profiler._is_profiler_enabled
        or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
        or of_all._global_backward_hooks
        or of_all._global_backward_pre_hooks
        or torch._C._get_tracing_state()
    )


def leaf_of(module: nn.Module) -> Leaf | None:
    """What the forward of a module does; None for all that is not just a layer of torch.nn."""
    return LEAVES.get(type(module))


def _of_linear(layer: Any) -> tuple[Any, ...]:
    parameters = layer._parameters
    return parameters["weight"], parameters["bias"]


def _of_convolution(layer: Any) -> tuple[Any, ...]:
    parameters = layer._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    return weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups


def _of_layer_norm(layer: Any) -> tuple[Any, ...]:
    parameters = layer._parameters
    return layer.normalized_shape, parameters["weight"], parameters["bias"], layer.eps


def _of_batch_norm(layer: Any) -> tuple[Any, ...] | None:
    buffers, parameters, training = layer._buffers, layer._parameters, layer.training
    if "running_mean" not in buffers or "running_var" not in buffers:
        return None
    if "_check_input_dim" in vars(layer):  # put there by others
        return None
    mean, variance = buffers["running_mean"], buffers["running_var"]
    by_batch = training or (mean is None and variance is None)
    if training and not layer.track_running_stats:
        mean = variance = None
    # momentum may be None, for which forward finds another: as never run before
    weight, bias = parameters["weight"], parameters["bias"]
    return mean, variance, weight, bias, by_batch, layer.momentum, layer.eps


def _count_batch(layer: Any) -> None:
    if layer.training and layer.track_running_stats and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)


def known_leaves() -> dict[type[nn.Module], Leaf]:
    """The layers whose forward is known, less those that others have changed."""
    leaves = (
        Leaf.of(nn.Linear, "linear", _of_linear),
        Leaf.of(nn.Conv1d, "conv1d", _of_convolution),
        Leaf.of(nn.Conv2d, "conv2d", _of_convolution),
        Leaf.of(nn.Conv3d, "conv3d", _of_convolution),
        Leaf.of(nn.BatchNorm1d, "batch_norm", _of_batch_norm, _count_batch),
        Leaf.of(nn.BatchNorm2d, "batch_norm", _of_batch_norm, _count_batch),
        Leaf.of(nn.BatchNorm3d, "batch_norm", _of_batch_norm, _count_batch),
        Leaf.of(nn.LayerNorm, "layer_norm", _of_layer_norm),
        Leaf.of(nn.GroupNorm, "group_norm"),
    )
    return {
        leaf.layer: leaf
        for leaf in leaves
        if _is_torchs_own(leaf.layer, leaf.forward)
        and (leaf.inner is None or _is_torchs_own(leaf.layer, leaf.inner))
    }


def known_bare_leaves() -> dict[type[nn.Module], BareLeaf]:
    """The layers without parameters whose forward is known, less those that others have changed."""
    elsewhere: dict[type[nn.Module], tuple[Any, str | None]] = {
        nn.Identity: (None, None),
        nn.Flatten: (Tensor, "flatten"),
        nn.Sigmoid: (torch, "sigmoid"),
        nn.Tanh: (torch, "tanh"),
    }
    names: dict[type[nn.Module], str] = {
        nn.ReLU: "relu",
        nn.ReLU6: "hardtanh",
        nn.LeakyReLU: "leaky_relu",
        nn.ELU: "elu",
        nn.GELU: "gelu",
        nn.SiLU: "silu",
        nn.Mish: "mish",
        nn.Hardswish: "hardswish",
        nn.Softplus: "softplus",
        nn.Softmax: "softmax",
        nn.LogSoftmax: "log_softmax",
        nn.Dropout: "dropout",
        nn.Dropout2d: "dropout2d",
        nn.MaxPool1d: "max_pool1d",
        nn.MaxPool2d: "max_pool2d",
        nn.MaxPool3d: "max_pool3d",
        nn.AvgPool1d: "avg_pool1d",
        nn.AvgPool2d: "avg_pool2d",
        nn.AvgPool3d: "avg_pool3d",
        nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
        nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
        nn.AdaptiveAvgPool3d: "adaptive_avg_pool3d",
        nn.Upsample: "interpolate",
    }
    places = elsewhere | {layer: (F, name) for layer, name in names.items()}
    return {
        layer: BareLeaf.of(layer, *place)
        for layer, place in places.items()
        if _is_torchs_own(layer, layer.forward)
    }


def _is_torchs_own(layer: type[nn.Module], method: Any) -> bool:
    """Whether a method is torch's: others may have put theirs there before this import.

    (Some layers have it from a class of another module of torch.nn.)
    """
    written_in = [vars(sys.modules[each.__module__]) for each in layer.__mro__[:-2]]
    return any(getattr(method, "__globals__", None) is one for one in written_in)


def method_of_all(method: Any) -> Any:
    """A method of nn.Module, if it is torch's own; else what no method is."""
    return method if getattr(method, "__globals__", None) is vars(of_all) else object()


CALL = method_of_all(nn.Module.__call__)
CALL_IMPL = method_of_all(nn.Module._call_impl)
SEQUENCE = (
    nn.Sequential.forward if _is_torchs_own(nn.Sequential, nn.Sequential.forward) else object()
)
IN_ORDER = nn.Sequential.__iter__ if SEQUENCE is nn.Sequential.forward else object()
LEAVES = known_leaves()
BARE_LEAVES = known_bare_leaves()
