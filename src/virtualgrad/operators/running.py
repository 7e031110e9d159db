r"""The running mean of SVGD at one site, and what the next commit will make of it.

    r <- rho r + (1 - rho) * statistic,      statistic = (u^2 / e) * sum of g^2

where e counts the numbers that are summed and u is the unit of g (the number m of samples, or 1).
Backward passes leave r alone: what they bring is kept beside it until a commit. So a site that no
backward pass has reached keeps its r, and a step that is skipped leaves no trace.

Eager passes keep the root of the sum, and count on the host. Compiled ones write into memory of
their own (:mod:`.compiled`), from where a commit takes the new r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.compiled import LARGE, Compiled
from virtualgrad.operators.numbers import add_to_all, dtype_on_cpu, multiply_all
from virtualgrad.operators.pieces import in_pieces
from virtualgrad.operators.statistic import mean_square
from virtualgrad.sites import Site


class Running:
    """r at one site.

    Attributes:
        r: the running mean as of the last commit. It lies in memory as sigma does, sample by
            sample, so that the two are read side by side.
        on_cpu: the dtype of r, and of the factor, on a CPU; None elsewhere (:mod:`.numbers`).
        device: where r lies.
        committed: whether there is an r to be saved.
        site: the site as it was last seen; what follows is read off its layout.
        view: the shape in which its axes are counted, where that is not sigma's own.
        averaged: the axes over which g^2 is averaged.
        sampled: whether one of them counts samples.
        elements_of_pass, samples_of_pass: e and m of one backward pass.
        broadcast_shape: the shape in which r stands beside g; None: its own will do.
        only_axis: the axis of sigma along which r differs, if there is just one.
        fusible: whether there may be kernels for T.
        kernels: what it is for -> the kind of g that it is for, and the kernel, if there is one.
        norm: root of the sum of g^2 since the last commit.
        gradient: sum of g since then, where sigma has no sample axis: there g is the gradient of
            the whole loss already, and its square is the statistic.
        elements, samples: e and m since then.
        rho: as last used: a commit knows no sites.
        loss_scale: the factor of the loss, and so of g, since the last commit.
        factor: s / sqrt(r + eps), made by commits for the next backward pass.
        factor_of: the s and eps of that factor.
        compiled: what compiled passes keep, at a site that one has seen.
        plain: T of a plain pass by C++, where there is one (:mod:`.native_transform`).
        plain_kind: the kind of g that Python had last in such a pass.
        plain_tried: the kind of g for which it is, or for which there is none.
    """

    site: Site | None = None
    view: tuple[int, ...] | None = None
    averaged: tuple[int, ...] = ()
    sampled: bool = True
    elements_of_pass: int = 1
    samples_of_pass: int = 1
    broadcast_shape: tuple[int, ...] | None = None
    only_axis: int | None = None
    fusible: bool = False
    unit_is_sample: bool = False
    norm: Tensor | None = None
    gradient: Tensor | None = None
    elements: int = 0
    samples: int = 0
    rho: float = 0.0
    loss_scale: float = 1.0
    factor: Tensor | None = None
    factor_of: tuple[float, float] | None = None
    compiled: Compiled | None = None
    plain: Any = None
    plain_kind: tuple[Any, ...] | None = None
    plain_tried: tuple[Any, ...] | None = None

    def __init__(self, r: Tensor, *, committed: bool) -> None:
        self.r = r
        self.on_cpu = dtype_on_cpu(r)
        self.device = r.device
        self.committed = committed
        self.kernels: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def kernel(
        self, purpose: str, known: tuple[Any, ...], prepare: Callable[..., Any], *arguments: Any
    ) -> Any:
        """The kernel for a purpose and a kind of g; prepared when one of that kind comes first."""
        found = self.kernels.get(purpose)
        if found is None or found[0] != known:
            found = self.kernels[purpose] = (known, prepare(*arguments))
        return found[1]

    @property
    def is_of_all(self) -> bool:
        """Whether sigma was a value for all samples in this step, or when it was last seen."""
        return self.gradient is not None or (self.site is not None and not self.sampled)

    @property
    def reached(self) -> bool:
        """Whether a backward pass may have reached the site since the last commit."""
        return self.elements > 0 or self.compiled is not None

    def add_samples(self, norm: Tensor, elements: int, samples: int) -> None:
        """Take in g by the root of its sum of squares, and its e and m."""
        self.norm = norm if self.norm is None else torch.hypot(self.norm, norm)
        self.elements += elements
        self.samples += samples

    def add_to_last(self, squares: Tensor) -> None:
        """Add to the sum of squares of samples that are counted already."""
        assert self.norm is not None
        self.norm = (self.norm.square() + squares).clamp_(min=0).sqrt_()

    def add_gradient(self, g: Tensor) -> None:
        """Take in a g without a sample axis."""
        self.gradient = g.clone() if self.gradient is None else self.gradient + g
        self.elements = 1

    @property
    def weight(self) -> float:
        """(1 - rho) u^2 / e, the weight of the sum of squares in the new r."""
        unit = (self.samples if self.unit_is_sample else 1) / self.loss_scale
        return (1 - self.rho) * unit * unit / max(self.elements, 1)

    def updated(self) -> Tensor:
        """The new r, as a commit would make it now."""
        decayed = self.r * self.rho
        if self.norm is not None:
            return decayed.addcmul_(self.norm, self.norm, value=self.weight)
        if self.gradient is not None:
            weight = (1 - self.rho) / self.loss_scale**2
            return decayed.add_(mean_square(self.gradient, self.averaged), alpha=weight)
        return self.r.clone()

    def take_from_compiled(self) -> None:
        """Take what compiled passes have brought, as if eager ones had."""
        assert self.compiled is not None
        elements, samples = self.compiled.counted()
        if not elements:
            return
        self.elements, self.samples = elements, samples
        if self.compiled.gradient is not None:
            self.gradient, self.elements = self.compiled.gradient.clone(), 1
        else:
            added = (self.compiled.candidate - self.rho * self.r).clamp_(min=0)
            self.norm = added.div_(self.weight).sqrt_()

    def give_to_compiled(self) -> None:
        """Make what was taken, and reduced since, the candidate again."""
        assert self.compiled is not None
        if self.elements:
            self.compiled.candidate.copy_(self.updated())
            self.compiled.is_written = True  # for what others have brought, maybe
        self.begin_anew()

    def hand_over(self) -> None:
        """Give what eager passes of this step have brought to the compiled ones, once."""
        assert self.compiled is not None
        if not self.elements:
            return
        self.compiled.candidate.copy_(self.updated())
        self.compiled.counts[:2] = torch.tensor((self.elements, self.samples))
        if self.gradient is not None and self.compiled.gradient is not None:
            self.compiled.gradient.copy_(self.gradient / self.loss_scale)
        self.begin_anew()

    def witness(self) -> Tensor | None:
        """A tensor that is finite if every g since the last commit was; None if there was none."""
        if self.compiled is not None:
            return self.compiled.candidate
        if not self.elements:
            return None
        kept = self.gradient if self.norm is None else self.norm
        return self.r if kept is None else kept

    def begin_anew(self) -> None:
        """Forget what eager passes have brought."""
        self.norm = self.gradient = None
        self.elements = self.samples = 0


def commit_all(sites: Sequence[Running]) -> None:
    """Make the new running means of all sites that were reached, and forget what made them.

    With the factors for the next backward pass: that of a site that was not reached stays.
    """
    compiled = [site.compiled for site in sites if site.compiled is not None]
    _copy_and_count_anew(compiled, [(kept.r, kept.candidate) for kept in compiled])
    groups: dict[tuple[Any, ...], list[Running]] = {}
    for site in sites:
        if site.elements:
            groups.setdefault((site.rho, site.factor_of, site.on_cpu), []).append(site)
    for (rho, factor_of, on_cpu), group in groups.items():
        if on_cpu == torch.float32 and _commit_in_cpp(group, rho, factor_of):
            continue
        means = [site.r for site in group]
        multiply_all(means, rho, on_cpu)
        _add_statistics(group, rho)
        if factor_of is not None:
            _renew_factors(group, means, factor_of, on_cpu)
    for site in sites:
        if site.elements or site.compiled is not None:
            site.committed = True
        site.begin_anew()


def _commit_in_cpp(
    group: Sequence[Running], rho: Any, factor_of: tuple[float, float] | None
) -> bool:
    """The commit of sites that agree in rho, s and eps, without torch's ops, to the same bits.

    False, and nothing was done, where :mod:`virtualgrad.native` was not built, or leaves it to
    them.
    """
    library = None if torch.compiler.is_compiling() else built()
    norms = [site.norm for site in group if site.norm is not None]
    if library is None or len(norms) < len(group):
        return False
    if not all(type(number) in {int, float} for number in (rho, *(factor_of or ()))):
        return False
    means, weights = [site.r for site in group], [site.weight for site in group]
    factors = [] if factor_of is None else [site.factor for site in group]
    done: bool = library.commit(means, norms, weights, rho, factors, factor_of)
    return done


def _add_statistics(group: Sequence[Running], rho: float) -> None:
    """Add what backward passes have brought to means that have decayed by rho already."""
    sampled = [site for site in group if site.norm is not None]
    if sampled:
        norms: list[Any] = [site.norm for site in sampled]
        weights = [site.weight for site in sampled]
        torch._foreach_addcmul_([site.r for site in sampled], norms, norms, weights)
    for site in group:
        if site.gradient is not None:
            weight = (1 - rho) / site.loss_scale**2
            site.r.add_(mean_square(site.gradient, site.averaged), alpha=weight)


def rollback_all(sites: Sequence[Running], *, is_new: bool = False) -> None:
    """Forget what backward passes have brought since the last commit; or, if r is new, all."""
    for site in sites:
        site.begin_anew()
    compiled = [site.compiled for site in sites if site.compiled is not None]
    if not compiled:
        return
    copies_all = is_new or torch.compiler.is_compiling()  # which does not see into a launch
    pairs = []
    for kept in compiled:
        if kept.restoring is None or copies_all or kept.is_written:
            pairs.append((kept.candidate, kept.r))
        else:
            kept.restoring()
    _copy_and_count_anew(compiled, pairs)


def _copy_and_count_anew(
    compiled: Sequence[Compiled], pairs: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Copy the second of each pair into the first, and set what compiled passes count to zero.

    In one launch, since a small network's step is short; but for large tensors, which a launch of
    their own copies at twice the speed.
    """
    if not compiled:
        return
    for target, source in pairs:
        if target.numel() >= LARGE:
            target.copy_(source)
    pairs = [pair for pair in pairs if pair[0].numel() < LARGE]
    for kept in compiled:
        kept.is_written = False
    zeroed = [(kept.counts, kept.graphs.zeros) for kept in compiled]
    targets, sources = zip(*pairs, *zeroed, strict=True)
    torch._foreach_copy_(*in_pieces(targets, sources))
    gradients = [kept.gradient for kept in compiled if kept.gradient is not None]
    if gradients:
        torch._foreach_zero_(gradients)


def forget_compiled(compiled: Sequence[Compiled]) -> None:
    """Set what compiled passes count to zero; their candidates are r already."""
    _copy_and_count_anew(compiled, [])


def renew_factors(sites: Sequence[Running]) -> None:
    """Make s / sqrt(r + eps) of all sites at once, for the next backward pass."""
    groups: dict[tuple[tuple[float, float], torch.dtype | None], list[Running]] = {}
    for site in sites:
        if site.factor_of is not None:
            groups.setdefault((site.factor_of, site.on_cpu), []).append(site)
    for (factor_of, on_cpu), group in groups.items():
        _renew_factors(group, [site.r for site in group], factor_of, on_cpu)


def _renew_factors(
    group: Sequence[Running],
    means: list[Tensor],
    factor_of: tuple[float, float],
    on_cpu: torch.dtype | None,
) -> None:
    """Write the factors of sites that agree in s and eps; in place, for captured steps."""
    scale, eps = factor_of
    factors: list[Any] = [site.factor for site in group]
    torch._foreach_copy_(factors, means)
    add_to_all(factors, eps, on_cpu)
    torch._foreach_rsqrt_(factors)
    if scale != 1:
        multiply_all(factors, scale, on_cpu)
