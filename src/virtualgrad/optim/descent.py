r"""Virtual gradient descent for any operator T, as a torch.optim.Optimizer.

    theta_k <- theta_k - alpha * (virtual gradient of theta_k)            (the paper's iteration)

The virtual gradients come from encapsulation 1: while the optimizer is attached to the model
(:mod:`.attaching`), ``loss.backward()`` leaves them in ``.grad``. What remains for ``step()`` is
the update of SGD, all of it or nothing: :mod:`.scaling` and :mod:`.nonfinite` tell when it must
not be made. :mod:`.groups` names the parameters, :mod:`.saving` puts the state of T into a
state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from virtualgrad.errors import DetachedError
from virtualgrad.operators import Operator, as_stateful, identity
from virtualgrad.optim import checks
from virtualgrad.optim.attaching import attach, detach_at_the_end
from virtualgrad.optim.gradients import GroupGradients, gradients_of
from virtualgrad.optim.groups import Numbering, Params, named_groups, summary
from virtualgrad.optim.mirror import Mirrors
from virtualgrad.optim.native_steps import forget_gradients, step_on_cpu
from virtualgrad.optim.newcomers import Newcomers
from virtualgrad.optim.nonfinite import GradientCheck, nonfinite_error
from virtualgrad.optim.occupied import occupy, require_free
from virtualgrad.optim.processes import find_ranks
from virtualgrad.optim.saving import add_operator_state, read_entries
from virtualgrad.optim.scaling import announce, learn_late, loss_scale, unknown_scaler
from virtualgrad.optim.second_passes import refuse_second_passes, second_passes_error
from virtualgrad.optim.switches import compare, switches_of
from virtualgrad.optim.unwaited import Unwaited, warn_at_the_end
from virtualgrad.optim.update import decay, descend
from virtualgrad.sites import Where
from virtualgrad.virtual import Attachment, named_parameters, unwrap

__all__ = ["Params", "VirtualGradientDescent"]


class VirtualGradientDescent(Optimizer):
    """Gradient descent along virtual gradients with any operator T.

    Args:
        model: the model whose ops are to be seen. It stays as it is, but for its backward pass.
        lr: alpha, the learning rate.
        operator: T, any callable ``(g, site) -> tensor of g's shape``. One that keeps a state
            serves one optimizer at a time.
        momentum: momentum on the virtual gradient.
        weight_decay: decoupled weight decay.
        where: which of the linear sites T acts on; by default all of them.
        params: parameters of the model to optimize, or groups of them with their own ``lr``,
            ``momentum`` and ``weight_decay``, as in torch.optim. By default all.
        batch_dim: the axis of the inputs that counts samples.
        nonfinite: what is done on a NaN or infinite gradient: ``"raise"`` an error or ``"skip"``
            the step. Parameters and state stay as they were in both cases. On a GPU nobody waits
            for the answer: it skips the step by itself, and the next ``step()`` raises
            (:meth:`settle` does at once). ``"ignore"``: nobody looks, as torch.optim does not, and
            NaN spreads, also the one by which a second pass through a *compiled* graph is noticed
            otherwise. (Steps in a captured CUDA graph are not checked: the host does not see them.)
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
        checks.require_choice("nonfinite", nonfinite, ("raise", "skip", "ignore"))
        checks.require_predicate(where)
        checks.require_operator(operator)
        checks.require_batch_dim(batch_dim)
        named = named_parameters(model)
        checks.require_parameters(named, model)
        defaults |= {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for name, value in defaults.items():
            checks.require_in_range(name, value)
        self.model = unwrap(model)
        self.operator = operator
        self._transaction = as_stateful(operator)
        require_free(self._transaction)
        self._switches = switches_of(self._transaction, where)
        self.nonfinite = nonfinite
        self.grad_scaler = grad_scaler
        self._numbering = Numbering()
        self._group_index = self._numbering.number
        self._mirrors = Mirrors() if mirrors is None else mirrors
        self._attachment = None
        self._newcomers = Newcomers(self.model)
        self._unwaited = Unwaited()
        groups = named_groups(params, named)
        checks.require_some(groups)
        super().__init__(groups, defaults)
        self._attachment = attach(self, model, where, batch_dim)
        occupy(self._transaction, self._attachment)
        try:
            self._join_ranks(model, process_group)
        except BaseException:
            self.detach()  # the model and its parameters are as free as before
            raise
        detach_at_the_end(self, self._attachment)
        warn_at_the_end(self, self._unwaited)

    # What a copied or unpickled optimizer has: it is not attached.
    _attachment: Attachment | None = None
    _transaction = as_stateful(identity)
    _mirrors = Mirrors()
    _unwaited = Unwaited()
    _switches: dict[str, str] = {}  # noqa: RUF012 - never written to
    _has_only_room = False  # of T's state: none is known to be made with our switches

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Has a GradScaler tell ``step()`` of itself, unless we know it: then it is as with SGD.

        (Trainers take this for a fused optimizer: Lightning would refuse to clip its gradients,
        and accelerate would not see that a step was skipped.)
        """
        return getattr(self, "grad_scaler", None) is None

    # ---------------------------------------------------------------- attachment

    def detach(self) -> None:
        """Put the model back as it was; the optimizer cannot step any more."""
        if self._attachment is not None:
            self._attachment.detach()
        self.settle()

    def __enter__(self) -> VirtualGradientDescent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._unwaited.forget()  # the error that is on its way is the one to be told
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
            (group,) = named_groups([param_group], named_parameters(self.model))
        for name in self.defaults:
            checks.require_in_range(name, group.get(name, self.defaults[name]))
        checks.require_unclaimed(group["params"], self._attachment)
        if self._attachment is not None:
            self._forget_replaced(group["params"])
        super().add_param_group(group)
        self._look_at_groups()
        if self._attachment is not None:
            self._attachment.intercept.track(dict(self._named_parameters()))
            checks.claim(self._named_parameters(), self._attachment)
            self._newcomers.know(group["params"])

    def _look_at_groups(self, *, is_late: bool = False) -> None:
        """Renew what T knows of the groups: users and schedulers write to them, or reorder them."""
        known = len(self._numbering.groups)
        self._numbering.renew(self.param_groups)
        if len(self._numbering.groups) != known and self._attachment is not None:
            self._attachment.intercept.renew()  # parameters may be in other groups than before
        scale = loss_scale(self.grad_scaler)
        self._mirrors.renew(self._numbering, scale, is_late=is_late)

    def _forget_replaced(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Drop the state of layers in whose place there are new ones."""
        intercept = self._attached().intercept
        replaced = {
            name for name, parameter in named if intercept.tracked.is_replaced(name, parameter)
        }
        gone = {key for key, names in intercept.parameters_at.items() if replaced & set(names)}
        if gone:
            state = self._transaction.state
            self._transaction.state = {key: state[key] for key in state if key not in gone}

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)

    # ---------------------------------------------------------------- steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what an operator has prepared from them."""
        if not (set_to_none and forget_gradients(self)):
            super().zero_grad(set_to_none)
        if self._attachment is not None:
            self._look_at_groups()
            if self.grad_scaler is not None:  # a compiled pass asks nobody
                self._announce_loss_scale()
            if not self._attachment.intercept.passes.at_rest:
                self._transaction.rollback()
            self._attachment.intercept.end_step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step along the virtual gradients that backward has left in ``.grad``."""
        attachment = self._attached()
        self._newcomers.look(self.model, attachment)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._look_at_groups(is_late=True)
        self.settle()
        looks = self.nonfinite != "ignore"
        self._unwaited.skips = self.nonfinite == "skip"
        is_scaled = vars(self).get("found_inf") is not None
        if not is_scaled and self._step_in_cpp(looks=looks):
            attachment.intercept.end_step(committed=True)
            return loss
        gradients = gradients_of(self.param_groups)
        if looks and not is_scaled and self._step_unwaited(gradients):
            attachment.intercept.end_step(committed=True)
            return loss
        check = GradientCheck(gradients)
        self._transaction.begin_reduction()
        if looks and self._transaction.ranks is not None and not is_scaled:
            check.look_ahead()  # a scaler's factor would have to be undone before
        self._transaction.reduce()  # the answers are those of all processes, or they part
        if self._refuse_scaled() or (looks and self._refuse_nonfinite(check)):
            return loss
        for each in gradients:
            self._step_group(each)
        self._transaction.commit()
        attachment.intercept.end_step(committed=True)
        return loss

    def _join_ranks(self, model: nn.Module, process_group: Any) -> None:
        """Share statistics with the processes that share the batch."""
        device = next(parameter for _, parameter in self._named_parameters()).device
        self._transaction.ranks = find_ranks(model, process_group, device, self._transaction)
        ranks = self._transaction.ranks
        self._attached().intercept.passes.ranks = 1 if ranks is None else ranks.size
        self._announce_loss_scale()

    def _announce_loss_scale(self) -> None:
        scale = loss_scale(self.grad_scaler)
        announce(scale, self._transaction, self._attached().intercept)

    def _refuse_scaled(self) -> bool:
        """Under a GradScaler: undo its factor; whether it found infinities, to skip the step."""
        given = vars(self)  # set there by the scaler for the time of this call
        found, scale = given.get("found_inf"), given.get("grad_scale")
        if found is None:
            return False
        if self.grad_scaler is None and not learn_late(scale, self._transaction):
            given.pop("found_inf")
            given.pop("grad_scale", None)
            self._transaction.rollback()
            raise unknown_scaler(type(self).__name__)
        if bool(found.sum() > 0) or self._transaction.nonfinite_sites():
            refuse_second_passes(self._transaction)
            self._transaction.rollback()
            self._attached().intercept.end_step()
            return True
        if scale is not None:
            grads = [p.grad for _, p in self._named_parameters() if p.grad is not None]
            torch._foreach_div_(grads, float(scale))
        return False

    def _refuse_nonfinite(self, check: GradientCheck) -> bool:
        """Whether to skip this step for a NaN or infinite gradient; forget it, or raise."""
        places = check.places(self._transaction)
        if not places:
            return False
        refuse_second_passes(self._transaction)
        self._transaction.rollback()
        if self.nonfinite == "skip":
            return True
        raise nonfinite_error(places)

    def settle(self) -> None:
        """Wait for the last step on a GPU; raise, if it met a NaN or an infinity.

        Otherwise the next ``step()`` raises, ``state_dict()`` or ``detach()``. The GPU has not made
        that step: parameters and state are as they were before it.
        """
        found = self._unwaited.settle()
        if found is None:
            return
        if found.second_passes:
            raise second_passes_error(found.second_passes)
        raise nonfinite_error(found.places, is_late=True)

    def _step_unwaited(self, gradients: list[GroupGradients]) -> bool:
        """Make a step that the GPU decides on; False if it must be made otherwise."""
        return self._unwaited.step(gradients, self._transaction, self._buffers_of)

    def _step_in_cpp(self, *, looks: bool) -> bool:
        """Make a step without Python; False, and nothing was done, if it must be made otherwise."""
        if looks and self._unwaited.step_again(self.param_groups, self._transaction):
            return True
        return step_on_cpu(self.param_groups, self._transaction, looks=looks)

    def _buffers_of(self, gradients: GroupGradients) -> list[Tensor] | None:
        """The buffers of momentum of a group; None if the first step has yet to make one."""
        if not gradients.group["momentum"]:
            return []
        found = [self.state[p].get("momentum_buffer") for p in gradients.params]
        return None if any(buffer is None for buffer in found) else found

    def _step_group(self, gradients: GroupGradients) -> None:
        group, params, grads, has_sparse = gradients
        momentum = group["momentum"]
        buffers = [self.state[p].get("momentum_buffer") if momentum else None for p in params]
        decay(params, lr=group["lr"], weight_decay=group["weight_decay"])
        made = descend(
            params,
            grads,
            buffers,
            lr=group["lr"],
            momentum=momentum,
            has_sparse_grad=has_sparse,
        )
        if momentum:
            for parameter, buffer in zip(params, made, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer

    # ---------------------------------------------------------------- state_dict

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim; the state of T stands at the first parameter of each site."""
        self.settle()
        packed = super().state_dict()
        served = {} if self._attachment is None else self._attachment.intercept.parameters_at
        named = list(self._named_parameters())
        switches = None if self._has_only_room else self._switches
        add_operator_state(packed, self._transaction.state, served, named, switches)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim; it may come before the first forward. All of it, or nothing.

        A state of T that was made with another ``per_sample``, ``loss_reduction`` or
        ``share_positions`` is refused: r would mean something else. Another ``stale`` or ``where``
        is a warning: every r is right, the steps are others.
        """
        attachment = self._attached()
        state_dict = checks.numbered(state_dict)
        checks.require_fitting_state(state_dict, self.param_groups)
        saved = read_entries(state_dict["state"], list(self._named_parameters()))
        compare(saved.made_with, self._switches)
        self._transaction.require_loadable(saved.operator)
        self._unwaited.forget()
        super().load_state_dict({**state_dict, "state": saved.plain})
        self._look_at_groups()
        self._transaction.rollback()
        self._transaction.state = saved.operator
        self._has_only_room = False
        attachment.intercept.parameters_at |= saved.parameters_at

    def __repr__(self) -> str:
        """One line for the optimizer, one for each group."""
        count = sum(p.numel() for _, p in self._named_parameters())
        model = getattr(self, "model", None)
        title = "no model" if model is None else type(model).__name__
        is_attached = self._attachment is not None and self._attachment.active
        detached = "" if is_attached else " (detached)"
        first = f"{type(self).__name__} on {title}: {count:,} parameters{detached}"
        return "\n".join([first, *summary(self.param_groups)])
