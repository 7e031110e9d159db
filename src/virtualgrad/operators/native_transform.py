"""T of SVGD in a plain pass by C++ (``transform.h``), where :mod:`virtualgrad.native` was built.

Python's T makes it the first time, and leaves at the site what is to be done the next time: where r
differs along the channels alone, sums of squares and a factor; where not, the launches of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from virtualgrad.native import built
from virtualgrad.operators.channels import Channels, Incoming
from virtualgrad.operators.finite import accumulation_dtype
from virtualgrad.operators.kernels_of_weights import may_use_tf32
from virtualgrad.operators.launches import Launched, recorded
from virtualgrad.operators.recipes import Step, recipe_of
from virtualgrad.operators.rms import RMS
from virtualgrad.operators.running import Running
from virtualgrad.operators.statistic import SUMMED_AS_THEY_ARE


def for_layer(transform: Any, g: Tensor, channels: Channels) -> Incoming:
    """``transform.for_layer`` in the plainest pass, which leaves at the site how it was made."""
    made: Incoming
    running = _to_be_left(transform, (g.shape, g.stride(), g.dtype, channels[:4]))
    if running is None:
        made = transform.for_layer(g, channels)
        return made
    with recorded() as steps:
        made = transform.for_layer(g, channels)
    is_stale, others = transform.operator.stale, []
    if is_stale and channels.convolved is not None:  # by which kernels are chosen
        others.append(channels.convolved.x)
    running.plain = _plain_t(running, g, others, channels, made, steps, is_stale)
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


def _plain_t(  # noqa: PLR0917 - all that a pass has left
    running: Running,
    g: Tensor,
    others: Sequence[Tensor],
    channels: Channels,
    made: Incoming,
    steps: Sequence[Step],
    stale: bool,
) -> Any:
    """What C++ is to do when such a g comes again; None where that is left to Python."""
    library = built()
    if library is None or running.view is not None or not running.sampled:
        return None
    f_for, recipe = _f_for(g, made, steps), None
    if f_for is not None and not _is_summed_in_cpp(g, running.r):
        return None
    if steps:
        product = None if made.g is g or f_for is not None else made.g
        results = (product, running.norm, made.total, made.weight, made.padded)
        recipe = recipe_of(library, steps, [g, running.r, *others], results)
        if recipe is None:
            return None
    by_tf32 = stale and channels.convolved is not None and g.dtype == torch.float32
    return library.PlainT(
        of_class=RMS,
        g=g,
        r=running.r,
        others=others,
        in_rows=channels.rows,
        total=channels.total,
        averaged=running.averaged,
        counts=(running.elements_of_pass, running.samples_of_pass),
        unit_is_sample=running.unit_is_sample,
        stale=stale,
        f_for=f_for,
        beside=running.broadcast_shape,
        recipe=recipe,
        uses_tf32=(may_use_tf32, may_use_tf32()) if by_tf32 else None,
    )


def _f_for(g: Tensor, made: Incoming, steps: Sequence[Step]) -> str | None:
    """What torch has multiplied by T's factor: the rows of gradients, or g; None: kernels have."""
    if made.rows is not None:
        return "rows"
    launches = [step for step in steps if isinstance(step, Launched)]
    written = [id(tensor) for launched in launches for tensor in launched.tensors]
    return None if made.weight is not None or id(made.g) in written else "g"


def _is_summed_in_cpp(g: Tensor, r: Tensor) -> bool:
    """Whether the sum of g^2 is made as C++ makes it: by one op, in the dtype of r."""
    if g.is_complex() or r.dtype != accumulation_dtype(g.dtype):
        return False
    return g.is_cuda or (g.is_cpu and g.dtype in SUMMED_AS_THEY_ARE)
