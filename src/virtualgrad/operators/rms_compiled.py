"""RMS in a compiled pass: no host in the backward pass, so all that it asks for is read before."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from virtualgrad.compiling import all_fixed, never_traced
from virtualgrad.errors import OperatorError
from virtualgrad.operators import kernels, rms_op, weights_op
from virtualgrad.operators.channels import Convolved, Total
from virtualgrad.operators.kernels_of_norms import Norm
from virtualgrad.operators.rms_op import Kept
from virtualgrad.operators.rms_settings import RMSSettings, factor_by, require_same_shape
from virtualgrad.operators.statistic import accumulated
from virtualgrad.sites import Site
from virtualgrad.sites.site import is_convolution

if TYPE_CHECKING:
    from virtualgrad.operators.compiled import Compiled, SumOrder
    from virtualgrad.operators.rms import RMS


class InCompiledPass:
    """RMS at one site, with its numbers as they are in this forward pass, as tensors.

    Asked for its strides, a g makes torch.compile copy it, and all that is made of it, into
    contiguous memory. So those of sigma are read.

    Args:
        rms: the operator.
        site: where.
        sigma: its value there.
    """

    loss_scale = 1.0  # known: it is among the numbers

    def __init__(self, rms: RMS, site: Site, sigma: Tensor) -> None:
        if rms.ranks is not None and not rms.stale:
            _refuse_ranks(site.key)
        numbers = rms.settings(site)
        # SVGD's settings have the factor among them; those of an RMS alone do not.
        mirrored = isinstance(numbers.loss_scale, Tensor)
        self.rms = rms
        self.numbers = numbers
        if not mirrored:
            alone = (numbers.scale, numbers.rho, numbers.eps, rms.loss_scale)
            self.numbers = RMSSettings(*[_as_tensor(number) for number in alone])
        self.site = site
        self.strides = sigma.reshape(rms.layout_at(site).view).stride()
        self._kind = (sigma.dtype, sigma.device)  # and g's
        # Found once: a compiler traces it each time.
        self._room = None if rms.learns_nothing(sigma) else self._begin()

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return s g / sqrt(r + eps), and write the candidate of the new r."""
        rms, layout = self.rms, self.rms.layout_at(site)
        if rms.learns_nothing(g):
            return g
        if not rms.share_positions and self._transforms_by_op(g):
            return self._by_op(g, None, may_pad=False)[0]
        return (g.reshape(layout.view) * self._take_in(g)).to(g.dtype).reshape(g.shape)

    def for_tokens(
        self, g: Tensor, *, only_seen: bool, total: Total | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return T(g) of tokens, or g if it is ``only_seen``, and prepare the new r.

        And the sum of g, or of T(g), over all axes but the last, if an op makes it on the way. Rows
        of T(g) may be longer than those of g (:func:`.channels.pitch_of`).
        Asked where it :meth:`sees_tokens`.

        Args:
            g: dJ/dsigma.
            only_seen: T's factor is known, and multiplies rows elsewhere.
            total: what a bias sums, if there is one: T(g), or g.
        """
        if self.rms.learns_nothing(g):
            return g, None
        if not only_seen:
            if self.rms.share_positions:
                return self(g, self.site), None
            return self._by_op(g, total, may_pad=True)
        if not self._sums_in_parts(g):
            self.note(g)
            return g, None
        return g, self._note_in_parts(g, is_summed=total is not None)[1]

    def for_images(
        self, g: Tensor, convolved: Convolved, *, only_seen: bool, total: Total | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of a convolution's weight and bias, and prepare the new r.

        By :mod:`.weights_op`. Asked where it :meth:`sees_images`.

        Args:
            g: dJ/dsigma.
            convolved: what sigma was made of.
            only_seen: T's factor is known, and multiplies rows elsewhere: gradients are those of g.
            total: what the bias sums, if there is one: T(g), or g.
        """
        rms, others = self.rms, (0, 2, 3)
        if rms.learns_nothing(g):
            shape = (g.shape[1], convolved.x.shape[1], *convolved.kernel)
            return g.new_zeros(shape), None if total is None else g.sum(others)
        r: Tensor | None = None
        if not rms.stale:
            r = self.note(g)
        elif not only_seen:
            r = self._kept.r
        numbers = None if r is None else self.numbers.together
        weight, squares = weights_op.weight_gradient(
            g, convolved, r, numbers, with_squares=rms.stale
        )
        if rms.stale:
            axes = rms.layout_at(self.site).averaged_axes(rms.share_positions)
            self._add_squares(squares.sum(axes))
        if total is None:
            return weight, None
        if total == "g" or r is None:
            return weight, accumulated(g).sum(others)
        factor = factor_by(r, self.numbers).unsqueeze(0)
        return weight, (accumulated(g).sum(0, keepdim=True) * factor).sum(others)

    def _by_op(
        self, g: Tensor, total: Total | None, *, may_pad: bool
    ) -> tuple[Tensor, Tensor | None]:
        product, summed = rms_op.transform(g, self._for_op(), total, may_pad=may_pad)
        self._count_for_op()
        return product, summed

    def sums(self, g: Tensor, times: Sequence[Tensor | None]) -> list[Tensor]:
        """For each v: the sum of T(g) v over all axes but the parameter's; prepare the new r.

        T(g) = f g, with one f for all samples: they are summed first, and T(g) is not made.

        Args:
            g: of a site whose layout has sigma's own axes.
            times: v, of sigma's shape, or None for 1.
        """
        rms, layout = self.rms, self.rms.layout_at(self.site)
        averaged = layout.averaged_axes(rms.share_positions)
        others = layout.averaged_axes(True)  # and the samples, one by now
        factor: Any = 1 if rms.learns_nothing(g) else self._take_in(g)
        wide = accumulated(g)
        found = []
        for v in times:
            columns = (wide if v is None else wide * v).sum(averaged, keepdim=True)
            found.append((columns * factor).sum(others))
        return found

    def _take_in(self, g: Tensor) -> Tensor:
        """Write the candidate of the new r; f of T(g) = f g, with the axes of g."""
        updated, rms = self.note(g), self.rms
        factor = self.factor() if rms.stale else factor_by(updated, self.numbers)
        return factor.reshape(rms.layout_at(self.site).broadcast_shape(rms.share_positions))

    def factor(self) -> Tensor:
        """S / sqrt(r + eps), r of before."""
        return factor_by(self._kept.r, self.numbers)

    def note(self, g: Tensor) -> Tensor:
        """Write the candidate of the new r; the new r, as T goes by it."""
        if self._sums_in_parts(g):
            return self._note_in_parts(g, is_summed=False)[0]
        rms, layout = self.rms, self.rms.layout_at(self.site)
        axes = layout.averaged_axes(rms.share_positions)
        by: SumOrder = "at once"
        if is_convolution(self.site.op) and layout.sample_axis == 0 and len(axes) > 1:
            by = "columns"  # g comes from a norm or a ReLU, made by the compiler
        return self._kept.add(
            g.reshape(layout.view),
            axes,
            counts=None if layout.sample_axis is None else self._counts_of_all,
            rho=self.numbers.rho,
            loss_scale=self.numbers.loss_scale,
            unit_is_sample=rms.unit_is_sample,
            graph=self._graph,
            by=by,
        )

    def _sums_in_parts(self, g: Tensor) -> bool:
        """Whether an op sums g^2 over shared positions; of 50,257 columns a compiler is faster."""
        return self.rms.share_positions and self.sees_tokens(g) and self.site.shape[-1] % 8 == 0

    def _note_in_parts(self, g: Tensor, *, is_summed: bool) -> tuple[Tensor, Tensor | None]:
        """As :meth:`note`, where it :meth:`_sums_in_parts`; and the sum of g, if it is wanted."""
        sums = rms_op.squares(g, is_summed=is_summed).sum(1)
        return self._add_squares(sums[0]), sums[1] if is_summed else None

    def _add_squares(self, squares: Tensor) -> Tensor:
        """As :meth:`note`, by the sum of g^2."""
        return self._kept.add_samples(
            squares / self.numbers.loss_scale**2,
            *self._counts_of_all,
            rho=self.numbers.rho,
            unit_is_sample=self.rms.unit_is_sample,
            graph=self._graph,
        )

    @property
    def _counts_of_all(self) -> tuple[int, int]:
        """(e, m) of a pass, e over all axes that are averaged."""
        layout = self.rms.layout_at(self.site)
        axes = layout.averaged_axes(self.rms.share_positions)
        return prod([layout.view[axis] for axis in axes]), layout.samples

    @property
    def _graph(self) -> Tensor:
        """The number of the present graph, thrice."""
        number: Tensor = getattr(self.rms.sites, self.rms.sites.graph_at(self.site.key))
        return number

    def norm_sums(self, g: Tensor, norm: Norm) -> Tensor:
        """Sums of g x^, g, T(g) x^ and T(g) for each channel of a batch norm; prepare the new r.

        By an op of our own, where it :meth:`sees_images`.
        """
        if self.rms.learns_nothing(g):
            return torch.zeros(4, g.shape[1], dtype=torch.float32, device=g.device)
        sums = rms_op.norm_sums(g, norm, self._for_op())
        self._count_for_op()
        return sums

    def sees_tokens(self, sigma: Tensor) -> bool:
        """Whether sigma is that of a linear layer on tokens, whose g an op of our own looks at."""
        last = len(self.site.shape) - 1
        return self.site.op == "linear" and last >= 2 and self._may_use_op(sigma, axis=last)

    def sees_images(self, sigma: Tensor) -> bool:
        """Whether sigma is images whose g an op of our own looks at: laid out channels-last.

        Others a compiler may lay out so for its convolutions, whatever we know, and would copy.
        """
        if sigma.dim() < 3 or not self._may_use_op(sigma, axis=1):
            return False
        return self.rms.sites.has_channels_innermost(self.site.key)

    def _transforms_by_op(self, g: Tensor) -> bool:
        """Whether T(g) is made by an op of our own.

        Of a convolution, if r is updated first: a compiler reads g twice, in long loops. With the
        r of before, T(g) and the sum of g^2 are made where it makes g.
        """
        if is_convolution(self.site.op):
            return not self.rms.stale and self.sees_images(g)
        return self.sees_tokens(g)

    def _may_use_op(self, sigma: Tensor, *, axis: int) -> bool:
        """Whether :mod:`.rms_op` can be used for the g of a sigma whose parameter has one axis."""
        site, layout = self.site, self.rms.layout_at(self.site)
        if site.shape != layout.view or layout.parameter_axes != {axis}:
            return False  # a parameter is the input, or among it
        if layout.sample_axis != 0 or self.numbers.together is None:
            return False  # (the numbers of an RMS alone are not on the device)
        if sigma.dtype not in kernels.DTYPES or not rms_op.is_usable(sigma.device):
            return False
        if self._room is None:
            self._begin()  # of no numbers; there must be an r to be asked
        return self.rms.sites.suits_kernels(site.key)

    def _for_op(self) -> Kept:
        """What an op needs to know; :meth:`_count_for_op` is to follow it."""
        rms, together = self.rms, self.numbers.together
        assert together is not None
        return self._kept.for_op(
            together,
            self._graph,
            counts=self._counts,
            stale=rms.stale,
            unit_is_sample=rms.unit_is_sample,
        )

    def _count_for_op(self) -> None:
        self._kept.count(*self._counts, self._graph)

    @property
    def _counts(self) -> tuple[int, int]:
        """(e, m) of a pass, where an op takes in its g."""
        layout = self.rms.layout_at(self.site)
        return layout.view[0], layout.samples  # rows that were picked are not as many

    @property
    def _kept(self) -> Compiled:
        """What is kept for the site."""
        return self._begin() if self._room is None else self._room

    def _begin(self) -> Compiled:
        """What is kept for the site; there is room for it before anything is traced."""
        rms, key, layout = self.rms, self.site.key, self.rms.layout_at(self.site)
        axes = layout.averaged_axes(rms.share_positions)
        kept = [axis for axis in range(len(layout.view)) if axis not in axes]
        shape = all_fixed([layout.view[axis] for axis in kept])
        strides = all_fixed([self.strides[axis] for axis in kept])
        gradient = all_fixed(layout.view) if layout.sample_axis is None else None
        name = rms.sites.begin_compiled(key, shape, strides, gradient, *self._kind)
        compiled: Compiled = getattr(rms.sites, name)
        if tuple(compiled.r.shape) != shape:
            require_same_shape(key, shape, all_fixed(compiled.r.shape), shared=rms.share_positions)
        return compiled


@never_traced("virtualgrad: on several processes a compiled model needs stale=True")
def _refuse_ranks(key: str) -> None:
    raise OperatorError.of(
        given=f"r updated first at {key}, in a compiled pass on several processes",
        allowed="stale=True there: T would need the other processes in the middle of it",
        todo="pass stale=True, or do not compile",
    )


@never_traced("virtualgrad: a subclass of RMS with a __call__ of its own is not compiled")
def refuse_subclass(name: str) -> None:
    """Raise: compiled passes would not go through that ``__call__``."""
    raise OperatorError.of(
        given=f"{name}, a subclass of RMS with a __call__ of its own, in a compiled pass",
        allowed="RMS itself there, or an operator that is not one",
        todo=f"compose what {name} adds with RMS(...), override `at` as well, or do not compile",
    )


def _as_tensor(number: Any) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float64)
