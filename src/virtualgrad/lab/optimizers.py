"""The optimizers of the experiments, by name.

The baselines are TensorFlow 1's, as in the released code: plain SGD, RMSProp whose mean square
starts at one, and Adam (whose eps of 1e-8 stands, in TensorFlow, a hair's breadth elsewhere than
in torch.optim.Adam; it makes no difference to any digit that a table shows).

Momentum, AdamW and Muon are none of the paper's; sweeps compare with them. Their settings beside
the learning rate are PyTorch's defaults, momentum 0.9.

An optimizer of your own is one more entry:

    OPTIMIZERS["mine"] = lambda model, lr, **options: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from virtualgrad.errors import ModelError
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


class MuonAndAdamW(Optimizer):
    """Muon for the hidden matrices of a model and AdamW for all else, as one optimizer.

    Muon's steps are scaled to the size of AdamW's (``match_rms_adamw``), so that one learning rate
    serves both.

    Raises:
        ModelError: There is no matrix between the first layer with weights and the last.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        hidden = hidden_matrices(model)
        if not hidden:
            raise ModelError.of(
                given=f"Muon for {type(model).__name__}, which has no hidden matrix",
                allowed="a model with an nn.Linear between its first layer and its last "
                "(torch.optim.Muon takes matrices alone)",
                todo="choose another optimizer, such as adamw",
            )
        chosen = {id(weight) for weight in hidden}
        others = [p for p in model.parameters() if id(p) not in chosen]
        on_gpu = hidden[0].is_cuda
        self.parts: tuple[Optimizer, Optimizer] = (
            torch.optim.Muon(hidden, lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr, capturable=on_gpu),
        )
        super().__init__([*hidden, *others], {"lr": lr})
        # The very groups of the parts, so that a learning rate that is set here is set there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both, told apart by their number."""
        saved = [part.state_dict() for part in self.parts]
        state = {
            f"{n}.{key}": v for n, each in enumerate(saved) for key, v in each["state"].items()
        }
        return {"state": state, "param_groups": [each["param_groups"] for each in saved]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        for number, part in enumerate(self.parts):
            keys = {key: key.partition(".") for key in state_dict["state"]}
            state = {
                int(own): state_dict["state"][key]
                for key, (of, _, own) in keys.items()
                if of == str(number)
            }
            groups = state_dict["param_groups"][number]
            part.load_state_dict({"state": state, "param_groups": groups})
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Weights of the linear layers between the first layer with weights and the last."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    return [layer.weight for layer in layers[1:-1] if isinstance(layer, nn.Linear)]


def _adam(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    def make(model: nn.Module, lr: float, **options: Any) -> Optimizer:
        # fused is one kernel; capturable keeps the step counter on the device, as a graph needs it
        on_gpu = next(model.parameters()).is_cuda
        return kind(model.parameters(), lr, capturable=on_gpu, fused=on_gpu or None, **options)

    return make


def _momentum(model: nn.Module, lr: float, momentum: float = 0.9, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum, **options)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda model, lr, **options: torch.optim.SGD(model.parameters(), lr, **options),
    "rmsprop": lambda model, lr, **options: TensorFlowRMSProp(model.parameters(), lr, **options),
    "adam": _adam(torch.optim.Adam),
    "svgd": SVGD.released,
    "svgd-algorithm1": SVGD,
    "sgd-momentum": _momentum,
    "adamw": _adam(torch.optim.AdamW),
}
"""Name -> makes the optimizer from a model, a learning rate and further settings."""

if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS["muon"] = MuonAndAdamW


def state_bytes(optimizer: Optimizer) -> int:
    """Memory that an optimizer's state takes, counters left out."""
    tensors = [
        value
        for entries in optimizer.state_dict()["state"].values()
        for value in entries.values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
