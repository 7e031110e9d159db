r"""SVGD, Stochastic Virtual Gradient Descent (Li and Shu, arXiv 1907.04021), Algorithm 1.

r_i <- rho r_i + (1 - rho) (1/m) sum over samples of g_i^2         at every site i
T(g_i) = s g_i / sqrt(r_i + eps)                                   where the op is linear
theta <- theta - alpha * (virtual gradient of theta)
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.compiler import is_compiling

from virtualgrad.errors import DetachedError, HyperparameterError
from virtualgrad.operators import RMS, RMSSettings
from virtualgrad.optim import checks
from virtualgrad.optim.descent import Params, VirtualGradientDescent
from virtualgrad.optim.mirror import Mirrors
from virtualgrad.sites import Site, Where, weights_only

SCALE_TIMES_LR = 0.002
"""s * alpha where no rate of RMSProp is known. In the first phases of the paper's three tables s
alone spans 0.001 to 0.1, but s * alpha is 0.001, 0.002 and 0.005."""


class SVGD(VirtualGradientDescent):
    """Stochastic Virtual Gradient Descent, as a drop-in for torch.optim.SGD.

    The defaults are the paper's Algorithm 1 as printed; :meth:`released` is what the authors' code
    does. (Not Stein's variational gradient descent, which has the same initials.)

    Args:
        model: the model. Parameters that no linear site reaches train by their plain gradient.
        lr: alpha, the learning rate; near that of SGD.
        scale: s, the scaling coefficient; ``lr * scale`` is what counts, and is near RMSProp's
            learning rate: 0.001 to 0.005 in the paper's settings, which are in the units of
            :meth:`released` (Algorithm 1's s is m times as large, m the batch size). The default,
            1, is the paper's algorithm without s: with it a transformer diverges at the ``lr`` of
            SGD. :meth:`from_sgd` finds another.
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
        nonfinite: on a NaN or infinite gradient ``"raise"`` an error or ``"skip"`` the step (a GPU
            skips it by itself, and the next ``step()`` raises: :meth:`settle`); or ``"ignore"`` it,
            as torch.optim does.
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
            if is_compiling():
                numbers = getattr(mirrors, mirrors.prepare(site.parameters[0]))
                return RMSSettings(numbers[0], numbers[1], numbers[2], numbers[3], numbers)
            optimizer = this()
            if optimizer is None:
                raise DetachedError.of(
                    given=f"backward through {site.key} after its optimizer was deleted",
                    allowed="an optimizer that lives until backward is done",
                    todo="keep the optimizer in a variable",
                )
            group = optimizer._numbering.groups[optimizer._group_index[site.parameters[0]]]
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
            group = optimizer._numbering.groups[optimizer._group_index[name]]
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

    @classmethod
    def from_sgd(
        cls,
        model: nn.Module,
        lr_sgd: float,
        lr_rmsprop: float | None = None,
        **options: Any,
    ) -> SVGD:
        """SVGD as released, by the paper's two rules, from learning rates that work.

        alpha(SVGD) is near alpha(SGD), and s * alpha(SVGD) near alpha(RMSProp), so

            lr = lr_sgd,        scale = lr_rmsprop / lr_sgd.

        They are rules of thumb: in the paper's own settings one of them is off by a factor of ten,
        or both by five. :func:`virtualgrad.suggest` checks settings on a few batches.

        Args:
            model: the model.
            lr_sgd: alpha(SGD), of SGD without momentum; with momentum mu it is lr / (1 - mu).
            lr_rmsprop: alpha(RMSProp), or that of Adam. None: 0.002 stands for it; in the paper's
                tables s * alpha(SVGD) is 0.001, 0.002 and 0.005.
            options: further options of SVGD, such as ``weight_decay``.
        """
        for name, rate in (("lr_sgd", lr_sgd), ("lr_rmsprop", lr_rmsprop)):
            if rate is not None:
                _require_rate(name, rate)
        if "scale" in options or "lr" in options:
            raise HyperparameterError.of(
                given="lr or scale for SVGD.from_sgd",
                allowed="lr_sgd and lr_rmsprop, from which it finds both",
                todo="use SVGD.released(model, lr, scale) to set them yourself",
            )
        product = SCALE_TIMES_LR if lr_rmsprop is None else lr_rmsprop
        return cls.released(model, lr_sgd, product / lr_sgd, **options)


def _require_rate(name: str, rate: Any) -> None:
    """Raise unless a learning rate can be divided by."""
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not is_number or not 0 < rate < math.inf:
        raise HyperparameterError.of(
            given=f"{name}={rate!r}",
            allowed=f"a number {name} > 0, finite",
            todo="give a learning rate that trains the model",
        )
