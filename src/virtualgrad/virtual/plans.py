"""Encapsulation 1, the plan: which T acts on which parameters of a site.

``where`` leaves parameters out, and parameters in different groups get a T, and a state, of their
own. So a site falls into parts with one operator each. They depend on little, and are found once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch.compiler import is_compiling

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators import Operator, identity
from virtualgrad.sites import Site, Where, every_linear_site, weights_only
from virtualgrad.sites.site import is_weight_of_product
from virtualgrad.virtual.calls import Call
from virtualgrad.virtual.parameters import TrackedParameters
from virtualgrad.virtual.passes import Passes
from virtualgrad.virtual.site_of_call import site_of

PLANS_REMEMBERED = 10_000

Plan = list[tuple[Site, Operator]]
"""The parts of a site, and the operator at each."""


class Plans:
    """Site -> its plan.

    Args:
        tracked: the tracked parameters.
        passes: the passes of the model.
        operator: T.
        where: chooses the linear sites at which T acts; elsewhere it is the identity.
        group_of: name of a parameter -> its group.

    Attributes:
        chooses: whether ``where`` is to be asked at all; the default takes every linear site.
        leaves_norms_out: whether it leaves out all norms, whatever their shape.
        chosen: site -> parameter -> what ``where`` said.
        parameters_at: site -> the parameters that its T serves.
    """

    def __init__(
        self,
        tracked: TrackedParameters,
        passes: Passes,
        operator: Operator,
        where: Where,
        group_of: Callable[[str], Hashable],
    ) -> None:
        self.operator = operator
        self.chooses = where is not every_linear_site
        self.leaves_norms_out = where is weights_only
        self.chosen: dict[str, dict[str, bool]] = {}
        self.parameters_at: dict[str, tuple[str, ...]] = {}
        self._tracked = tracked
        self._passes = passes
        self._where = where
        self._group_of = group_of
        self._groups: dict[Hashable, int] = {}
        self._plans: dict[Site, Plan] = {}

    def clear(self) -> None:
        """Forget the plans: parameters have come, or have changed their group."""
        self._plans.clear()

    def of(self, call: Call, shape: tuple[int, ...], batch_dim: int) -> Plan:
        """The plan of a call; equal sites have one plan, with the site that came first."""
        batch_size = self._passes.current.batch_size
        site = site_of(call, shape, self._tracked, batch_size, batch_dim)
        if is_compiling():
            return self._split(site)
        plan = self._plans.get(site)
        if plan is None:
            if len(self._plans) >= PLANS_REMEMBERED:  # inputs of ever new sizes
                self._plans.clear()
            plan = self._plans[site] = self._split(site)
        return plan

    def choose(self, site: Site) -> bool:
        """Whether T acts at a site, for some parameter of it."""
        return any([self._is_chosen(site, name) for name in site.parameters])

    def leave_out(self, plan: Plan) -> bool:
        """Whether ``where`` has left all parameters of a site out."""
        return self.operator is not identity and all([part is identity for _, part in plan])

    def _split(self, site: Site) -> Plan:
        """Split a site into parts with one operator each: by choice, then by parameter group."""
        groups: dict[Hashable, list[str]] = {}
        left: list[str] = []
        for name in site.parameters:
            if self._is_chosen(site, name):
                groups.setdefault(self._group(name), []).append(name)
            else:
                left.append(name)
        plan: Plan = []
        for number, names in enumerate(groups.values()):
            part = site.only(*names)
            if number > 0:  # sigma's r is the first group's; another one keeps its own
                part = part._replace(key=f"{site.key}[{names[0]}]")
            self._note_parameters(part.key, tuple(names), is_compiling())
            plan.append((part, self.operator))
        return [*plan, (site.only(*left), identity)] if left else plan

    def _group(self, name: str) -> Hashable:
        if is_compiling():
            return self._tell_group(name, self._tracked.edition)
        return self._group_of(name)

    @settled_while_tracing
    def _tell_group(self, name: str, edition: str) -> int:
        """A number for the group of a parameter, for a compiler."""
        return self._groups.setdefault(self._group_of(name), len(self._groups))

    def _is_chosen(self, site: Site, name: str) -> bool:
        """What ``where`` says; asked once, or once per compilation."""
        if not self.chooses:
            return True
        if is_compiling():
            return self._is_chosen_while_tracing(site.only(name))
        chosen = self.chosen.setdefault(site.key, {})
        if name not in chosen:
            chosen[name] = bool(self._where(site.only(name)))
        return chosen[name]

    def _is_chosen_while_tracing(self, site: Site) -> bool:
        if self.leaves_norms_out:  # our own choice: what it looks at is plain, and it is settled
            return is_weight_of_product(site.roles, site.op)
        return bool(self._where(site))

    @settled_while_tracing
    def _note_parameters(self, key: str, names: tuple[str, ...], compiling: bool) -> None:
        """Remember what a T serves; of a compiled call, watch one parameter for its backward."""
        self.parameters_at[key] = names
        if compiling:
            self._passes.watch_backward(self._tracked[names[0]])
