r"""Virtual gradient descent for any operator T, as a torch.optim.Optimizer.

    theta_k <- theta_k - alpha * (virtual gradient of theta_k)            (the paper's iteration)

The virtual gradients come from encapsulation 1: while the optimizer is attached to the model,
``loss.backward()`` leaves them in ``.grad``. What remains for ``step()`` is the update of SGD.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from virtualgrad.errors import DetachedError, ModelError, NonFiniteError, ScaledLossError
from virtualgrad.operators import Operator, as_stateful, identity
from virtualgrad.optim import checks
from virtualgrad.optim.mirror import Mirrors
from virtualgrad.optim.processes import find_ranks
from virtualgrad.optim.update import decay, descend
from virtualgrad.sites import Where, every_linear_site
from virtualgrad.virtual import Attachment, Intercept, named_parameters, unwrap

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def _begin_pass(this: weakref.ref[VirtualGradientDescent]) -> None:
    """Before a forward pass: read the factor of the loss, and forget what was thrown away.

    ``p.grad = None`` throws gradients away without telling the optimizer.
    """
    optimizer = this()
    if optimizer is None:
        return
    if optimizer.grad_scaler is not None:
        optimizer._set_loss_scale(optimizer._loss_scale())
    if not optimizer._transaction.has_prepared():
        return
    if all(p.grad is None for _, p in optimizer._named_parameters()):
        optimizer._transaction.rollback()


def _forget(this: weakref.ref[VirtualGradientDescent]) -> None:
    """Forget what backward prepared: the model's gradients were cleared, to None or zeros."""
    optimizer = this()
    if optimizer is not None:
        optimizer._transaction.rollback()


class VirtualGradientDescent(Optimizer):
    """Gradient descent along virtual gradients with any operator T.

    Args:
        model: the model whose ops are to be seen. It stays as it is, but for its backward pass.
        lr: alpha, the learning rate.
        operator: T, any callable ``(g, site) -> tensor of g's shape``.
        momentum: momentum on the virtual gradient.
        weight_decay: decoupled weight decay.
        where: which of the linear sites T acts on; by default all of them.
        params: parameters of the model to optimize, or groups of them with their own ``lr``,
            ``momentum`` and ``weight_decay``, as in torch.optim. By default all.
        batch_dim: the axis of the inputs that counts samples.
        nonfinite: what ``step()`` does on a NaN or infinite gradient: ``"raise"`` an error or
            ``"skip"`` the step. Parameters and state stay as they were in both cases. (Steps in
            a captured CUDA graph are not checked: the host does not see them.)
        grad_scaler: the torch.amp.GradScaler that scales the loss. T must know the factor; where
            it is not given, ``step()`` takes it from the scaler if that is early enough, or raises.
        process_group: the processes that share a batch, as in DistributedDataParallel; "auto" for
            those of the DDP model, or else all that torch.distributed knows; None for this one
            alone.
        mirrors: where T looks for its numbers in compiled passes, if it has any.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor,
        operator: Operator = identity,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        where: Where | None = None,
        params: Params | None = None,
        batch_dim: int = 0,
        nonfinite: str = "raise",
        grad_scaler: GradScaler | None = None,
        process_group: Any = "auto",
        mirrors: Mirrors | None = None,
        **defaults: Any,
    ) -> None:
        checks.require_model(model)
        checks.require_choice("nonfinite", nonfinite, ("raise", "skip"))
        checks.require_predicate(where)
        named = named_parameters(model)
        checks.require_parameters(named, model)
        defaults |= {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in defaults.items():
            checks.require_in_range(name, value)
        self.model = unwrap(model)
        self.operator = operator
        self._transaction = as_stateful(operator)
        self.nonfinite = nonfinite
        self.grad_scaler = grad_scaler
        self._group_index: dict[str, int] = {}
        self._mirrors = Mirrors() if mirrors is None else mirrors
        self._attachment = None
        super().__init__(self._named_groups(params, named), defaults)
        this = weakref.ref(self)  # the model must not keep its optimizer alive

        def group_of(name: str) -> int:
            optimizer = this()
            return -1 if optimizer is None else optimizer._group_index[name]

        intercept = Intercept(
            dict(self._named_parameters()),
            operator,
            where=where or every_linear_site,
            group_of=group_of,
            batch_dim=batch_dim,
        )
        intercept.before_pass = functools.partial(_begin_pass, this)
        self._attachment = Attachment(model, intercept)
        self._attachment.cleared = functools.partial(_forget, this)
        checks.claim(self._named_parameters(), self._attachment)
        self._join_ranks(model, process_group)
        weakref.finalize(self, self._attachment.detach)

    _step_supports_amp_scaling = True  # has a GradScaler tell us of itself, see step()
    # What a copied or unpickled optimizer has: it is not attached.
    _attachment: Attachment | None = None
    _transaction = as_stateful(identity)
    _mirrors = Mirrors()

    # ---------------------------------------------------------------- attachment

    def detach(self) -> None:
        """Put the model back as it was; the optimizer cannot step any more."""
        if self._attachment is not None:
            self._attachment.detach()

    def __enter__(self) -> VirtualGradientDescent:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def _attached(self) -> Attachment:
        attachment = self._attachment
        if attachment is None or not attachment.active:
            raise DetachedError.of(
                given=f"{type(self).__name__} that is not attached to a model: detached, copied or "
                "unpickled",
                allowed="an attached optimizer: without one, gradients are plain ones",
                todo=f"make a new {type(self).__name__}(model, ...) and load_state_dict into it",
            )
        return attachment

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, as torch.optim does; new layers are attached, too."""
        if self._attachment is None:  # called by the constructor: names are there already
            group = param_group
        else:
            self._attached().refresh()
            (group,) = self._named_groups([param_group], named_parameters(self.model))
        for name in self.defaults:
            checks.require_in_range(name, group.get(name, self.defaults[name]))
        checks.require_unclaimed(group["params"], self._attachment)
        names = [name for name, _ in group["params"]]
        if self._attachment is not None:
            self._forget_replaced(group["params"])
        super().add_param_group(group)
        self._mirrors.renew(self.param_groups, self._loss_scale())
        self._group_index |= dict.fromkeys(names, len(self.param_groups) - 1)
        if self._attachment is not None:
            self._attachment.intercept.track(dict(self._named_parameters()))
            checks.claim(self._named_parameters(), self._attachment)

    def _forget_replaced(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Drop the state of layers in whose place there are new ones."""
        intercept = self._attached().intercept
        replaced = {name for name, parameter in named if intercept.is_replaced(name, parameter)}
        gone = {key for key, names in intercept.parameters_at.items() if replaced & set(names)}
        if gone:
            state = self._transaction.state
            self._transaction.state = {key: state[key] for key in state if key not in gone}

    def _named_groups(
        self, params: Params | None, named: Mapping[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Groups of (name, parameter), whatever form the user gave them in."""
        if params is None:
            return [{"params": list(named.items())}]
        if isinstance(params, Tensor):
            params = [params]
        given: list[Any] = list(params)
        if not given:
            raise ModelError.of(
                given="empty params=", allowed="at least one parameter", todo="leave out params="
            )
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        names = {id(parameter): name for name, parameter in named.items()}
        result = []
        for group in groups:
            if "params" not in group:
                raise ModelError.of(
                    given=f"a parameter group with {sorted(group)} only",
                    allowed="a dict with 'params'",
                    todo="add the parameters of the group under 'params'",
                )
            entries = group["params"]
            entries = [entries] if isinstance(entries, Tensor) else list(entries)
            tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
            for position, tensor in enumerate(tensors):
                if id(tensor) not in names:
                    raise ModelError.of(
                        given=f"entry {position} of params=, which is no parameter of the model",
                        allowed="parameters of the model",
                        todo="take them from model.parameters() or model.named_parameters()",
                    )
            result.append({**group, "params": [(names[id(t)], t) for t in tensors]})
        return result

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    # ---------------------------------------------------------------- steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what an operator has prepared from them."""
        super().zero_grad(set_to_none)
        if self._attachment is not None:
            self._mirrors.renew(self.param_groups, self._loss_scale())
            self._transaction.rollback()
            self._attachment.intercept.end_step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step along the virtual gradients that backward has left in ``.grad``."""
        attachment = self._attached()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._mirrors.renew(self.param_groups, self._loss_scale(), is_late=True)
        self._transaction.reduce()
        if self._refuse_scaled() or self._refuse_nonfinite():
            return loss
        for group in self.param_groups:
            self._step_group(group)
        self._transaction.commit()
        attachment.intercept.end_step()
        return loss

    def _join_ranks(self, model: nn.Module, process_group: Any) -> None:
        """Share statistics with the processes that share the batch."""
        device = self.param_groups[0]["params"][0].device
        self._transaction.ranks = find_ranks(model, process_group, device, self._transaction)
        ranks = self._transaction.ranks
        self._attached().intercept.ranks = 1 if ranks is None else ranks.size
        self._set_loss_scale(self._loss_scale())

    def _loss_scale(self) -> float:
        """The factor of the loss in the next backward pass."""
        return 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())

    def _set_loss_scale(self, scale: float) -> None:
        ranks = self._transaction.ranks
        if self._transaction.loss_scale is not None:
            self._transaction.loss_scale = scale
        elif ranks is not None:  # the loss of a rank is W times its share in the loss of all
            scale *= ranks.size
        self._attached().intercept.loss_scale = scale

    def _refuse_scaled(self) -> bool:
        """Under a GradScaler: undo its factor; whether it found infinities, to skip the step."""
        given = vars(self)  # set there by the scaler for the time of this call
        found, scale = given.get("found_inf"), given.get("grad_scale")
        if found is None:
            return False
        if self.grad_scaler is None and not self._learn_scale(scale):
            given.pop("found_inf")
            given.pop("grad_scale", None)
            self._transaction.rollback()
            raise ScaledLossError.of(
                given="a step by a torch.amp.GradScaler that the optimizer does not know",
                allowed="losses as they are, or a scaler that T knows of: T forgets the scale of "
                "g, so undoing it afterwards would shrink the step",
                todo=f"pass it, {type(self).__name__}(model, ..., grad_scaler=scaler), or set "
                "optimizer.grad_scaler = scaler",
            )
        if bool(found.sum() > 0) or self._transaction.nonfinite_sites():
            self._transaction.rollback()
            self._attached().intercept.end_step()
            return True
        if scale is not None:
            grads = [p.grad for _, p in self._named_parameters() if p.grad is not None]
            torch._foreach_div_(grads, float(scale))
        return False

    def _learn_scale(self, scale: Tensor | None) -> bool:
        """Take the factor from a scaler at the last moment; whether that is not too late."""
        was_told = getattr(self._transaction, "scale_was", None)
        return scale is not None and was_told is not None and was_told(float(scale))

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        momentum = group["momentum"]
        buffers = [self.state[p].get("momentum_buffer") if momentum else None for p in params]
        decay(params, lr=group["lr"], weight_decay=group["weight_decay"])
        made = descend(params, [p.grad for p in params], buffers, lr=group["lr"], momentum=momentum)
        if momentum:
            for parameter, buffer in zip(params, made, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer

    def _refuse_nonfinite(self) -> bool:
        """Whether to skip this step for a NaN or infinite gradient; forget it, or raise."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # the host cannot look while a CUDA graph is captured or replayed
        places = self._transaction.nonfinite_sites()
        if not places:
            grads = [(name, p.grad) for name, p in self._named_parameters() if p.grad is not None]
            place = checks.first_nonfinite(grads)
            places = [] if place is None else [place]
        if not places:
            return False
        self._transaction.rollback()
        if self.nonfinite == "skip":
            return True
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        raise NonFiniteError.of(
            given=f"a NaN or infinite gradient at {places[0]}{more}",
            allowed="finite gradients; parameters and state are as they were before this step",
            todo="look at the inputs and the loss of this batch, lower lr, or pass "
            "nonfinite='skip' to skip such steps",
        )

    # ---------------------------------------------------------------- state_dict

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; the state of T stands at the first parameter of each site."""
        packed = super().state_dict()
        shapes = {name: tuple(p.shape) for name, p in self._named_parameters()}
        packed["virtualgrad"] = {"version": 1, "shapes": shapes}
        index = {name: i for i, (name, _) in enumerate(self._named_parameters())}
        for key, tensors in self._transaction.state.items():
            owner = index[self._attachment.intercept.parameters_at[key][0]]  # type: ignore[union-attr]
            for name, tensor in tensors.items():
                packed["state"].setdefault(owner, {})[f"{name}@{key}"] = tensor
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim; it may come before the first forward. All of it, or nothing."""
        attachment = self._attached()
        state_dict = checks.numbered(state_dict)
        checks.require_fitting_state(state_dict, self.param_groups)
        named = list(self._named_parameters())
        operator_state: dict[str, dict[str, Tensor]] = {}
        plain_state: dict[Any, dict[str, Any]] = {}
        parameters_at: dict[str, tuple[str, ...]] = {}
        for index, entries in state_dict["state"].items():
            name, parameter = named[index]
            for entry, value in entries.items():
                kind, at, key = entry.partition("@")
                if at:  # torch would cast r to the dtype of the parameter
                    tensor = value.detach().clone().to(parameter.device)
                    operator_state.setdefault(key, {})[kind] = tensor
                    parameters_at[key] = (name,)
                else:
                    plain_state.setdefault(index, {})[entry] = value
        super().load_state_dict({**state_dict, "state": plain_state})
        self._mirrors.renew(self.param_groups, self._loss_scale())
        self._transaction.rollback()
        self._transaction.state = operator_state
        attachment.intercept.parameters_at |= parameters_at

    def __repr__(self) -> str:
        """One line for the optimizer, one for each group."""
        count = sum(p.numel() for _, p in self._named_parameters())
        attached = self._attachment is not None and self._attachment.active
        lines = [f"{type(self).__name__} on {self._title()}: {count:,} parameters"]
        lines[0] += "" if attached else " (detached)"
        for number, group in enumerate(self.param_groups):
            numbers = ", ".join(f"{n}={float(group[n]):g}" for n in checks.RANGES if n in group)
            lines.append(f"  group {number}: {len(group['params'])} tensors, {numbers}")
        return "\n".join(lines)

    def _title(self) -> str:
        model = getattr(self, "model", None)
        return "no model" if model is None else type(model).__name__
