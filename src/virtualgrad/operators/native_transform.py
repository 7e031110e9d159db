"""T of SVGD in a plain pass by C++ (``transform.h``), where :mod:`virtualgrad.native` was built.

Python's T makes it the first time, and leaves at the site what is to be done the next time: where r
differs along the channels alone, sums of squares and a factor; where not, the launches of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.finite import accumulation_dtype
from virtualgrad.operators.kernels_of_norms import Norm
from virtualgrad.operators.kernels_of_weights import may_use_tf32
from virtualgrad.operators.launches import Launched, recorded
from virtualgrad.operators.recipes import Step, recipe_of
from virtualgrad.operators.rms import RMS
from virtualgrad.operators.running import Running
from virtualgrad.operators.statistic import SUMMED_AS_THEY_ARE


class Left(NamedTuple):
    """What a pass of Python has left to be done again.

    Attributes:
        g: dJ/dsigma.
        others: the tensors that kernels were given beside g and r.
        made: what the layer is to pull back.
        steps: launches, and sums behind them.
        could_use: of the layer: whether T as a factor for rows, and what else.
        by_tf32: whether convolutions may use TF32, where kernels were chosen by that.
        window: of a convolution: sizes of the weight, stride, padding and dilation.
    """

    g: Tensor
    others: list[Tensor]
    made: Incoming
    steps: Sequence[Step]
    could_use: tuple[bool, str | None]
    by_tf32: bool | None = None
    window: tuple[int, ...] = ()


def for_layer(
    transform: Any, g: Tensor, channels: Channels | None, wanted: str | None = None
) -> Incoming:
    """``transform.for_layer`` in the plainest pass, which leaves at the site how it was made.

    Args:
        transform: of the site.
        g: dJ/dsigma.
        channels: of the layer.
        wanted: what else it could use, if not the total that the channels tell of.
    """
    made: Incoming
    is_for_rows = channels is not None and channels.rows
    if wanted is None and channels is not None:
        wanted = channels.total
    options = None if channels is None else channels[:4]
    convolved = None if channels is None else channels.convolved
    window = () if convolved is None else (convolved.kernel, *convolved.window)
    kind = (g.shape, g.stride(), g.dtype, options, wanted, window)
    running = _to_be_left(transform, kind)
    if running is None:
        made = transform.for_layer(g, channels)
        return made
    with recorded() as steps:
        made = transform.for_layer(g, channels)
    others = []
    if transform.operator.stale and convolved is not None:
        others.append(convolved.x)  # by which kernels are chosen
    by_tf32 = may_use_tf32() if others and g.dtype == torch.float32 else None
    flat = tuple(size for part in window for size in part)
    left = Left(g, others, made, steps, (is_for_rows, wanted), by_tf32, flat)
    running.plain = _plain_t(transform.operator, running, left)
    return made


def for_norm(
    transform: Any,
    g: Tensor,
    norm: Norm,
    wanted: str | None,
    make: Callable[[], tuple[Incoming, Tensor]],
) -> Incoming:
    """What a batch norm is to pull back on a GPU, and how it was made is left at the site, too.

    Args:
        transform: of the site.
        g: dJ/dsigma.
        norm: the batch norm.
        wanted: which gradients are.
        make: all of them by kernels, or, where there are none, what weight and bias pull back; and
            g as they read it.
    """
    kind = (g.shape, g.stride(), g.dtype, norm.x.stride(), norm.x.dtype, wanted)
    running = _to_be_left(transform, kind)
    if running is None:
        return make()[0]
    with recorded() as steps:
        made, g = make()
    others = [] if made.weight is None else list(norm)
    launches = [step for step in steps if isinstance(step, Launched)]
    given = {id(tensor) for launched in launches for tensor in launched.tensors}
    # Of what was copied first, such as a weight with gaps, no more is left.
    if not others or all(id(tensor) in given for tensor in (g, *others)):
        left = Left(g, others, made, steps, (True, wanted))
        running.plain = _plain_t(transform.operator, running, left)
    return made


def _to_be_left(transform: Any, kind: tuple[Any, ...]) -> Running | None:
    """The site where a pass, the first since a commit, is to leave how T was made; None: nowhere.

    A kind of g has to come twice in a row: of sequences that are ever longer or shorter nothing is
    left, which would cost more than it brings. And what was tried for a kind is not tried again.
    """
    operator, site = transform.operator, transform.site
    running: Running | None = operator.sites.kept.get(site.key) if type(operator) is RMS else None
    if running is None or running.site is not site or running.elements:
        return None
    came_before, running.plain_kind = running.plain_kind == kind, kind
    if not came_before or running.plain_tried == kind:
        return None
    running.plain_tried = kind
    return running


def _plain_t(operator: RMS, running: Running, left: Left) -> Any:
    """What C++ is to do when such a g comes again; None where that is left to Python."""
    library, (g, others, made, steps, could_use, by_tf32, window) = built(), left
    if library is None or running.view is not None or not running.sampled:
        return None
    if running.norm is None or (not operator.stale and running.rho == 1):
        return None
    f_for, recipe = _f_for(left), None
    if f_for is not None and not _is_summed_in_cpp(g, running.r):
        return None
    if steps:
        product = None if made.g is g or f_for is not None else made.g
        results = (product, running.norm, made.total, made.weight, made.padded)
        recipe = recipe_of(library, steps, [g, running.r, *others], results)
        if recipe is None:
            return None
    return library.PlainT(
        of_class=RMS,
        g=g,
        r=running.r,
        others=others,
        window=window,
        in_rows=could_use[0],
        wanted=could_use[1],
        averaged=running.averaged,
        counts=(running.elements_of_pass, running.samples_of_pass),
        unit_is_sample=running.unit_is_sample,
        stale=operator.stale,
        f_for=f_for,
        beside=running.broadcast_shape,
        recipe=recipe,
        uses_tf32=None if by_tf32 is None else (may_use_tf32, by_tf32),
    )


def _f_for(left: Left) -> str | None:
    """What torch has multiplied by T's factor: the rows of gradients, or g; None: kernels have."""
    if left.made.rows is not None:
        return "rows"
    launches = [step for step in left.steps if isinstance(step, Launched)]
    written = [id(tensor) for launched in launches for tensor in launched.tensors]
    return None if left.made.weight is not None or id(left.made.g) in written else "g"


def _is_summed_in_cpp(g: Tensor, r: Tensor) -> bool:
    """Whether the sum of g^2 is made as C++ makes it: by one op, in the dtype of r."""
    if g.is_complex() or r.dtype != accumulation_dtype(g.dtype):
        return False
    return g.is_cuda or (g.is_cpu and g.dtype in SUMMED_AS_THEY_ARE)
