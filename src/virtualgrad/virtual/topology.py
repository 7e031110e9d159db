r"""Encapsulation 2: change the topology of the backward graph, for any program as it is.

For a loss J with a recorded graph G, every site i has a node; with g_i = dJ/dsigma_i,

    virtual gradient of theta_k = sum over sites i of (d sigma_i / d theta_k)^T T_i(g_i).

All g_i come from one ordinary backward pass that stops at nothing; each pull-back is the node's
own backward, called with T_i(g_i) in place of g_i. Slow and readable: the reference for
encapsulation 1, and the way to try an operator on a program that cannot be changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from virtualgrad.errors import LossError, ModelError, NonFiniteError
from virtualgrad.operators import Operator, as_stateful
from virtualgrad.sites import Where, every_linear_site
from virtualgrad.sites.graph import GraphSite, find_graph_sites, walk
from virtualgrad.virtual.pulled import gradients_at, pull_back_all

Parameters = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


def virtual_grad(
    loss: Tensor,
    params: Parameters,
    operator: Operator,
    *,
    where: Where | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
    batch_size: int | None = None,
    batch_dim: int = 0,
) -> tuple[Tensor | None, ...]:
    """Virtual gradients of a loss, like ``torch.autograd.grad``: nothing in the forward changes.

    Args:
        loss: J, a scalar.
        params: theta: parameters (leaf tensors), as a list, as (name, parameter) pairs or as a
            dict. Names are used in the sites and in errors.
        operator: T, any callable ``(g, site) -> tensor of g's shape``. It acts on the linear
            sites; elsewhere T is the identity. An operator with a state makes one step per call.
        where: a further choice among the linear sites, asked one parameter at a time.
        retain_graph: keep the graph for another backward pass.
        allow_unused: give None for a parameter that the loss does not depend on, instead of an
            error.
        batch_size: number of samples in the batch, for operators that average over samples. None:
            the axis ``batch_dim`` of every sigma that comes from data is the sample axis.
        batch_dim: the axis that counts samples.

    Returns:
        One virtual gradient per parameter, in order.
    """
    named = name_parameters(params)
    require_loss(loss)
    unique = dict(named)
    sites = find_graph_sites([loss.grad_fn], unique, batch_size=batch_size, batch_dim=batch_dim)
    transaction = as_stateful(operator)
    _refuse_hidden_ops(loss, sites)
    try:
        arrived = gradients_at(loss, sites)
        virtual = pull_back_all(sites, arrived, operator, where or every_linear_site, unique)
        plain = _plain_gradients(loss, unique, retain_graph, allow_unused)
        _require_finite(transaction.nonfinite_sites())
    except BaseException:
        transaction.rollback()
        raise
    transaction.commit()
    return tuple(virtual.get(name, plain[name]) for name, _ in named)


def name_parameters(params: Parameters) -> list[tuple[str, Tensor]]:
    """(name, parameter) pairs of any of the accepted forms; unnamed ones are numbered."""
    items: Sequence[Any]
    if isinstance(params, Tensor):
        items = [params]
    else:
        items = list(params.items() if isinstance(params, Mapping) else params)
    named = [
        item if isinstance(item, tuple) else (f"params[{i}]", item) for i, item in enumerate(items)
    ]
    if not named:
        raise ModelError.of(
            given="no parameters", allowed="at least one", todo="pass model.parameters()"
        )
    first_name: dict[int, str] = {}
    for name, parameter in named:
        if not (isinstance(parameter, Tensor) and parameter.is_leaf and parameter.requires_grad):
            raise ModelError.of(
                given=f"{name}, which is {_describe(parameter)}",
                allowed="leaf tensors that require grad",
                todo="pass parameters, such as model.parameters() or model.named_parameters()",
            )
        first_name.setdefault(id(parameter), name)
    return [(first_name[id(parameter)], parameter) for _, parameter in named]


def require_loss(loss: Any) -> None:
    """Raise unless the loss is a scalar with a graph behind it."""
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        raise LossError.of(
            given=f"a loss that is {_describe(loss)}",
            allowed="a tensor with one element that requires grad",
            todo="compute it from the parameters, outside torch.no_grad(), and reduce it",
        )


def _refuse_hidden_ops(loss: Tensor, sites: list[GraphSite]) -> None:
    """Raise if an optimizer is attached, whose ops have another T, or if ops cannot be seen."""
    functions = [_function_of(node) for node in walk([loss.grad_fn])]
    if any(function.startswith("virtualgrad.") for function in functions):
        raise ModelError.of(
            given="a loss of a model with an optimizer attached, whose ops have a T already",
            allowed="a graph of plain ops",
            todo="call optimizer.detach() first, or use a copy.deepcopy of the model",
        )
    # With an optimizer attached, a compiler has its T in there, too.
    compiled = [_function_of(site.node).startswith("torch._functorch._aot") for site in sites]
    if any(compiled) or any(function.endswith(".ApplyTemplate") for function in functions):
        raise ModelError.of(
            given="a loss of a compiled model: a compiler has made one node of its ops",
            allowed="a graph of plain ops",
            todo="compute the loss by the model that is not compiled",
        )


def _function_of(node: Any) -> str:
    """Full name of the torch.autograd.Function that made a node; empty for one of torch's own."""
    function = getattr(type(node), "_forward_cls", None)
    if function is not None:
        return f"{function.__module__}.{function.__qualname__}"
    in_cpp = re.match(r"torch::autograd::CppNode<(.*)>", node.name())
    return "" if in_cpp is None else in_cpp[1].replace("::", ".")


def _require_finite(places: list[str]) -> None:
    if places:
        raise NonFiniteError.of(
            given=f"a NaN or infinite gradient at {places[0]}",
            allowed="finite gradients; the state of the operator is as it was",
            todo="look at the inputs and the loss",
        )


def _plain_gradients(
    loss: Tensor, parameters: Mapping[str, Tensor], retain_graph: bool, allow_unused: bool
) -> dict[str, Tensor | None]:
    """The gradients where no T acts; this last pass frees the graph unless it is retained."""
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=retain_graph, allow_unused=True
    )
    unused = [name for name, grad in zip(parameters, gradients, strict=True) if grad is None]
    if unused and not allow_unused:
        raise LossError.of(
            given=f"{unused[0]}, on which the loss does not depend",
            allowed="parameters that the loss depends on",
            todo="leave it out, or pass allow_unused=True to get None for it",
        )
    return dict(zip(parameters, gradients, strict=True))


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    kind = "leaf" if value.is_leaf else "non-leaf"
    grad = "requires" if value.requires_grad else "does not require"
    return f"a {kind} tensor of shape {tuple(value.shape)} that {grad} grad"
