"""The same training by other means: an oracle for everything that users do around an optimizer.

A :class:`Twin` gets its virtual gradients from ``virtual_grad``, which reads the recorded graph and
attaches nothing, and descends with torch's own SGD. So schedulers, clipping, averaging and
parameter groups act there on an optimizer that is certainly right about them. T itself is shared
with the optimizer, so a twin does not test it; :func:`shared_linear_step` does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad import virtual_grad
from virtualgrad.operators import RMS

LR, SCALE, RHO, EPS = 0.05, 0.3, 0.9, 1e-6


class Twin:
    """A copy of a model that trains along ``virtual_grad`` with torch.optim.SGD.

    Args:
        model: the model to copy, before an optimizer is attached to it.
        lr: alpha.
        momentum: of torch.optim.SGD.
        groups: parameter groups of torch.optim.SGD, made from the copy.
        batch_dim: as for ``virtual_grad``.
        rms: options of T.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = LR,
        *,
        momentum: float = 0.0,
        groups: Any = None,
        batch_dim: int = 0,
        **rms: Any,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.rms = RMS(**{"scale": SCALE, **rms})
        self.batch_dim = batch_dim
        params = self.model.parameters() if groups is None else groups(self.model)
        self.optimizer = torch.optim.SGD(params, lr, momentum=momentum)

    def backward(self, loss: Tensor, batch_size: int) -> None:
        """Put the virtual gradients of a loss into ``.grad``; None where it does not reach."""
        self.optimizer.zero_grad()
        trainable = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        gradients = virtual_grad(
            loss,
            trainable,
            self.rms,
            allow_unused=True,
            batch_size=batch_size,
            batch_dim=self.batch_dim,
        )
        for (_, parameter), gradient in zip(trainable, gradients, strict=True):
            parameter.grad = gradient


def assert_trained_alike(model: nn.Module, twin: nn.Module, start: nn.Module | None = None) -> None:
    """All parameters equal to float64 precision; with ``start``, all of them have moved."""
    expected = dict(twin.named_parameters())
    assert expected.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64, name  # the tolerance needs it
        torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-13, msg=name)
        if start is not None:
            moved = (parameter - start.get_parameter(name)).norm().item()
            assert moved > 1e-6, f"{name} has not moved"


def shared_linear_step(r: Tensor, g: Tensor, x: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """(r, virtual gradient of W, of b) of a linear layer whose r is shared over positions.

    Args:
        r: of before this step, one number per feature.
        g: dJ/dsigma as autograd brings it of a mean loss, (rows, features).
        x: what went into the layer, (rows, features).
        m: number of samples; one sample's loss has m times the g of the mean loss.
    """
    r = RHO * r + (1 - RHO) * (m * g).square().mean(0)
    t = SCALE * g / torch.sqrt(r + EPS)
    return r, t.t() @ x, t.sum(0)
