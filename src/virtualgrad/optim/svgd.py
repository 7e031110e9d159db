r"""SVGD, Stochastic Virtual Gradient Descent (Li and Shu, arXiv 1907.04021), Algorithm 1.

r_i <- rho r_i + (1 - rho) (1/m) sum over samples of g_i^2         at every site i
T(g_i) = s g_i / sqrt(r_i + eps)                                   where the op is linear
theta <- theta - alpha * (virtual gradient of theta)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from virtualgrad.errors import DetachedError
from virtualgrad.operators import RMS, RMSSettings
from virtualgrad.optim import checks
from virtualgrad.optim.descent import Params, VirtualGradientDescent
from virtualgrad.optim.mirror import Mirrors
from virtualgrad.sites import Site, Where, weights_only


class SVGD(VirtualGradientDescent):
    """Stochastic Virtual Gradient Descent, as a drop-in for torch.optim.SGD.

    The defaults are the paper's Algorithm 1 as printed; :meth:`released` is what the authors' code
    does. (Not Stein's variational gradient descent, which has the same initials.)

    Args:
        model: the model. Parameters that no linear site reaches train by their plain gradient.
        lr: alpha, the learning rate; near that of SGD.
        scale: s, the scaling coefficient; ``scale * lr`` is near RMSProp's learning rate.
        rho: decay of r.
        eps: added to r under the root.
        momentum: momentum on the virtual gradient.
        weight_decay: decoupled weight decay.
        per_sample: g of one sample's loss (Algorithm 1); False: of the batch's loss.
        stale: divide by the r of before this step; False: update r first (Algorithm 1).
        share_positions: average r over spatial or sequence positions too: one number per output
            channel, for inputs of changing size.
        where: which of the linear sites T acts on, such as :func:`virtualgrad.weights_only`.
        params: some of the model's parameters, or groups of them with their own ``lr``,
            ``scale``, ``rho``, ``eps``, ``momentum`` and ``weight_decay``.
        loss_reduction: whether the loss is the ``"mean"`` or the ``"sum"`` over the samples.
        batch_dim: the axis of the inputs that counts samples (1 for time-first sequences).
        nonfinite: on a NaN or infinite gradient ``"raise"`` an error or ``"skip"`` the step.
        grad_scaler: the torch.amp.GradScaler that scales the loss, if there is one.
        process_group: the processes that share a batch; "auto" for those of a DDP model, or else
            all of torch.distributed; None for this one alone.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor,
        *,
        scale: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        per_sample: bool = True,
        stale: bool = False,
        share_positions: bool = False,
        where: Where | None = None,
        params: Params | None = None,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
        nonfinite: str = "raise",
        grad_scaler: GradScaler | None = None,
        process_group: Any = "auto",
    ) -> None:
        checks.require_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        this = weakref.ref(self)  # the model must not keep its optimizer alive
        mirrors = Mirrors()

        def settings(site: Site) -> RMSSettings:
            optimizer = this()
            if optimizer is None:
                raise DetachedError.of(
                    given=f"backward through {site.key} after its optimizer was deleted",
                    allowed="an optimizer that lives until backward is done",
                    todo="keep the optimizer in a variable",
                )
            index = optimizer._group_index[site.parameters[0]]
            if torch.compiler.is_compiling():
                numbers = getattr(mirrors, mirrors.prepare(index))
                return RMSSettings(numbers[0], numbers[1], numbers[2], numbers[3])
            group = optimizer.param_groups[index]
            return RMSSettings(group["scale"], group["rho"], group["eps"])

        operator = RMS(
            per_sample=per_sample,
            stale=stale,
            share_positions=share_positions,
            loss_reduction=loss_reduction,
            settings=settings,
        )
        super().__init__(
            model,
            lr,
            operator,
            momentum=momentum,
            weight_decay=weight_decay,
            where=where,
            params=params,
            batch_dim=batch_dim,
            nonfinite=nonfinite,
            grad_scaler=grad_scaler,
            process_group=process_group,
            mirrors=mirrors,
            scale=scale,
            rho=rho,
            eps=eps,
        )

        def rho_at(key: str) -> float:
            optimizer = this()
            assert optimizer is not None
            name = optimizer._attached().intercept.parameters_at[key][0]
            group = optimizer.param_groups[optimizer._group_index[name]]
            return float(group["rho"])

        operator.rho_at = rho_at

    @classmethod
    def released(
        cls, model: nn.Module, lr: float | Tensor, scale: float = 1.0, **options: Any
    ) -> SVGD:
        """The method of the authors' released code, from which the paper's tables come.

        T acts on the weights of matmul and convolution only, on the gradient of the batch's loss,
        with the r of before the step.
        """
        as_released: dict[str, Any] = {"per_sample": False, "stale": True, "where": weights_only}
        return cls(model, lr, scale=scale, **(as_released | options))
