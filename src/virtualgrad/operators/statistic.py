"""What T of SVGD measures of g: sums of squares over some axes, in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

from virtualgrad.operators.finite import accumulation_dtype

SUMMED_AS_THEY_ARE = (torch.float32, torch.float64)


def accumulated(g: Tensor) -> Tensor:
    """The gradient in the dtype in which it is added up."""
    dtype = accumulation_dtype(g.dtype)
    # Asking first is cheaper than converting to the same.
    return g if g.is_complex() or g.dtype == dtype else g.to(dtype)


def sum_of_squares(g: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sum of |g|^2 over some axes."""
    return _squares(g).sum(axes)


def sum_of_columns(g: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The same in two sums, over the first axis and then over the rest.

    A compiler makes the first one where it makes g: as large as one sample, its result is all that
    is read again.
    """
    return _squares(g).sum(axes[0], keepdim=True).sum(axes)


def _squares(g: Tensor) -> Tensor:
    return accumulated(g.abs() if g.is_complex() else g).square()


def root_of_squares(g: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The root of the sum of |g|^2 over some axes, in one pass over g (on a CPU two are faster)."""
    if g.is_cpu and g.dtype in SUMMED_AS_THEY_ARE:  # as a rule there, and quickly asked
        # One axis as a number: torch takes 0.6 us longer to read a tuple.
        return g.square().sum(axes[0] if len(axes) == 1 else axes).sqrt_()
    if g.is_cpu or g.is_complex():
        return sum_of_squares(g, axes).sqrt_()
    norm: Tensor = torch.linalg.vector_norm(g, dim=axes, dtype=accumulation_dtype(g.dtype))
    return norm


def squares_added(g: Tensor, before: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Sum of |before + g|^2 - |before|^2 over some axes."""
    g, before = accumulated(g), accumulated(before)
    product = g * (g + 2 * before).conj()
    return (product.real if product.is_complex() else product).sum(axes)


def mean_square(gradient: Tensor, averaged: tuple[int, ...]) -> Tensor:
    """The statistic of a g without a sample axis: its square, averaged over shared positions."""
    square = gradient.abs().square() if gradient.is_complex() else gradient.square()
    return square.mean(averaged) if averaged else square
