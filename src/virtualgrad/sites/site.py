r"""A site: one use of a parameter, and the hidden value sigma that it makes.

In the paper's letters: an op f takes parameters theta directly and gives

    sigma = f(theta; other values),          sigma in V(theta -> sigma).

Backprop brings g = dJ/dsigma to the site; an operator T turns it into T(g), and the pull-back of
T(g) through f is the site's share of the virtual gradient.

Which axes of sigma mean what decides what T may average over. An axis of sigma is

* a **parameter axis** if it comes from the parameter (output features, channels),
* the **sample axis** if it comes from the data and counts the samples of the batch,
* a **position axis** otherwise (rows and columns of an image, steps of a sequence).

Both records are tuples: a compiler makes those at once, where it would trace the making of a
dataclass line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from virtualgrad.compiling import settled_while_tracing


class Layout(NamedTuple):
    """How the axes of sigma are to be read.

    Attributes:
        view: the shape in which the axes below are counted. It is sigma's own shape, or sigma's
            with one axis split where an op sees samples and positions folded into one axis.
        parameter_axes: the axes of ``view`` that come from the parameter.
        sample_axis: the axis of ``view`` that counts samples, or None.
        samples: the number m of samples of the batch that sigma belongs to (1 without sample axis).
        rows: the layout without that split, where there is one: all rows averaged alike.
    """

    view: tuple[int, ...]
    parameter_axes: frozenset[int]
    sample_axis: int | None
    samples: int
    rows: Layout | None = None

    @property
    def is_of_one_sample(self) -> bool:
        """Whether the batch has one sample, so that a value for all of it looks like the sample's.

        Which of the two it is, larger batches tell.
        """
        axis = self.sample_axis
        return axis is not None and self.view[axis] == self.samples == 1

    def without_samples(self) -> Layout:
        """The layout of the same sigma as a value for the whole batch, which has one sample."""
        assert self.sample_axis is not None
        return _unsampled(self.view, self.parameter_axes, self.sample_axis)

    def averaged_axes(self, share_positions: bool) -> tuple[int, ...]:
        """Axes over which a statistic of g is averaged: samples, and positions if shared."""
        if share_positions:
            return tuple(a for a in range(len(self.view)) if a not in self.parameter_axes)
        return () if self.sample_axis is None else (self.sample_axis,)

    def broadcast_shape(self, share_positions: bool) -> tuple[int, ...]:
        """Shape in which such a statistic stands beside g: size 1 for every averaged axis."""
        averaged = self.averaged_axes(share_positions)
        return tuple([1 if axis in averaged else size for axis, size in enumerate(self.view)])

    def state_shape(self, share_positions: bool = False) -> tuple[int, ...]:
        """Shape of a statistic of g, such as the paper's r: ``view`` without the averaged axes."""
        averaged = self.averaged_axes(share_positions)
        return tuple(size for axis, size in enumerate(self.view) if axis not in averaged)


def read_layout(
    shape: tuple[int, ...],
    parameter_axes: frozenset[int],
    *,
    batch_size: int | None,
    batch_dim: int = 0,
    foldable: bool = True,
) -> Layout:
    """Find the sample axis of a sigma of the given shape.

    Args:
        shape: shape of sigma.
        parameter_axes: axes of sigma that come from the parameter; never the sample axis.
        batch_size: the number m of samples of the batch; None if nobody knows it, in which case
            the axis ``batch_dim`` is believed to be the sample axis wherever it comes from data.
        batch_dim: the axis that counts samples in the model's inputs.
        foldable: whether the op computes with activations, so that a leading axis of another size
            than m holds samples and positions together: (m*T, C) as flattened from (m, T, C), or
            rows that were picked (a mixture of experts; by chance their number may be a multiple
            of m, so such models should share positions). False for lookups, whose leading axis
            may come from constant indices (positions).
    """
    data_axes = [axis for axis in range(len(shape)) if axis not in parameter_axes]
    if batch_dim in data_axes and (batch_size is None or batch_size == shape[batch_dim]):
        return Layout(shape, parameter_axes, batch_dim, shape[batch_dim])
    # Rows lead, except in a batch of products with one weight each: (weights, rows, features).
    axis = 1 if parameter_axes == {0, 2} and len(shape) == 3 else 0
    if not batch_size or not foldable:
        return _unsampled(shape, parameter_axes, batch_dim)
    others = [other for other in data_axes if shape[other] == batch_size]
    if len(others) == 1:  # time-first inside a batch-first model, or the other way round
        return Layout(shape, parameter_axes, others[0], batch_size)
    rows = shape[axis] if axis in data_axes else 0
    if rows == 0 or (rows == 1 and axis == 0 and len(shape) > 2):
        return _unsampled(shape, parameter_axes, batch_dim)  # (1, T, C): a constant, not samples
    all_rows = Layout(shape, parameter_axes, axis, batch_size)
    if rows % batch_size:  # rows of no known order: each is some sample's
        return all_rows
    positions = rows // batch_size
    folded = (batch_size, positions) if batch_dim == 0 else (positions, batch_size)
    return Layout(
        view=(*shape[:axis], *folded, *shape[axis + 1 :]),
        parameter_axes=frozenset(a if a < axis else a + 1 for a in parameter_axes),
        sample_axis=axis if batch_dim == 0 else axis + 1,
        samples=batch_size,
        rows=all_rows,
    )


def _unsampled(shape: tuple[int, ...], parameter_axes: frozenset[int], batch_dim: int) -> Layout:
    """The layout of a value for the whole batch.

    Where the samples would be counted, it may have an axis of size one: (1, T, C). That one is left
    out, as the sample axis is, so that r has the same shape in a batch of one sample.
    """
    if batch_dim in parameter_axes or len(shape) <= batch_dim or shape[batch_dim] != 1:
        return Layout(shape, parameter_axes, None, 1)
    axes = frozenset(axis - (axis > batch_dim) for axis in parameter_axes)
    return Layout((*shape[:batch_dim], *shape[batch_dim + 1 :]), axes, None, 1)


class Site(NamedTuple):
    """One op that takes parameters directly, and its output sigma.

    Attributes:
        key: name of sigma, stable from step to step: where it is made, by which op, which time.
        op: the op f, such as ``"linear"`` or ``"conv2d"``.
        parameters: names of the parameters theta that f takes directly.
        roles: what each of them is to the op, ``"weight"`` (it multiplies) or ``"bias"``.
        linear: whether f is linear (affine) in each of ``parameters``, other arguments held fixed.
        shape: shape of sigma.
        layout: the meaning of sigma's axes.
    """

    key: str
    op: str
    parameters: tuple[str, ...]
    roles: tuple[str, ...]
    linear: bool
    shape: tuple[int, ...]
    layout: Layout

    @property
    def has_sample_axis(self) -> bool:
        """Whether one axis of sigma counts the samples of the batch."""
        return self.layout.sample_axis is not None

    def only(self, *names: str) -> Site:
        """The same site as seen by some of its parameters: the pairs (i, j) of the paper."""
        if names == self.parameters:
            return self
        kept = [(p, r) for p, r in zip(self.parameters, self.roles, strict=True) if p in names]
        parameters, roles = zip(*kept, strict=True)
        return Site(self.key, self.op, parameters, roles, self.linear, self.shape, self.layout)

    def state_elements(self, share_positions: bool = False) -> int:
        """How many numbers a statistic of g, such as the paper's r, holds at this site."""
        return prod(self.layout.state_shape(share_positions))


@settled_while_tracing
def is_convolution(op: str) -> bool:
    """Whether an op is a convolution, or a transposed one; compilers are told, and look up less."""
    return op in CONVOLUTION_OPS


@settled_while_tracing
def has_flat_arguments(op: str) -> bool:
    """Whether no argument of an op is a list that may hold tensors."""
    return op == "linear" or op in CONVOLUTION_OPS


Where = Callable[[Site], bool]
"""A predicate that chooses sites; it is asked with one parameter of a site at a time."""


MATMUL_OPS = frozenset(
    ("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "einsum", "tensordot")
)
CONVOLUTION_OPS = frozenset(
    {f"conv{n}d" for n in (1, 2, 3)} | {f"conv_transpose{n}d" for n in (1, 2, 3)} | {"convolution"}
)


def weights_only(site: Site) -> bool:
    """The choice of the authors' released code: weights of matmul and convolution, nothing else."""
    return is_weight_of_product(site.roles, site.op)


@settled_while_tracing
def is_weight_of_product(roles: tuple[str, ...], op: str) -> bool:
    """Whether the only parameter of a site is what a matmul or a convolution multiplies by."""
    return roles == ("weight",) and op in MATMUL_OPS | CONVOLUTION_OPS


def every_linear_site(site: Site) -> bool:
    """The choice of Algorithm 1 as printed: every op that is linear in the parameter."""
    return True
