"""The optimizers of the experiments, by name.

The baselines are TensorFlow 1's, as in the released code: plain SGD, RMSProp whose mean square
starts at one, and Adam (whose eps of 1e-8 stands, in TensorFlow, a hair's breadth elsewhere than
in torch.optim.Adam; it makes no difference to any digit that a table shows).

An optimizer of your own is one more entry:

    OPTIMIZERS["mine"] = lambda model, lr, **options: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from virtualgrad.optim import SVGD


class TensorFlowRMSProp(Optimizer):
    """q <- rho q + (1 - rho) g*g, starting at q = 1;  theta <- theta - lr g / sqrt(q + eps)."""

    def __init__(self, params: Any, lr: float, rho: float = 0.9, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            squares = [self._mean_square(p) for p in params]
            torch._foreach_mul_(squares, group["rho"])
            torch._foreach_addcmul_(squares, grads, grads, 1 - group["rho"])
            roots = torch._foreach_sqrt(torch._foreach_add(squares, group["eps"]))
            torch._foreach_addcdiv_(params, grads, list(roots), -group["lr"])
        return loss

    def _mean_square(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["mean_square"] = torch.ones_like(parameter)
        square: Tensor = state["mean_square"]
        return square


def _adam(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    # capturable keeps the step counter on the device, as a CUDA graph needs it
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.Adam(model.parameters(), lr, capturable=on_gpu, **options)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda model, lr, **options: torch.optim.SGD(model.parameters(), lr, **options),
    "rmsprop": lambda model, lr, **options: TensorFlowRMSProp(model.parameters(), lr, **options),
    "adam": _adam,
    "svgd": SVGD.released,
    "svgd-algorithm1": SVGD,
}
"""Name -> makes the optimizer from a model, a learning rate and further settings."""


def state_bytes(optimizer: Optimizer) -> int:
    """Memory that an optimizer's state takes, counters left out."""
    tensors = [
        value
        for entries in optimizer.state_dict()["state"].values()
        for value in entries.values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
