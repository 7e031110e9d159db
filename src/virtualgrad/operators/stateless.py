"""Operators without a state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from virtualgrad.errors import HyperparameterError
from virtualgrad.sites import Site


def identity(g: Tensor, site: Site, /) -> Tensor:
    """T(g) = g: the virtual gradient is the gradient."""
    return g


@dataclass(frozen=True)
class Sign:
    """T(g) = s sign(g)."""

    scale: float = 1.0

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return s sign(g)."""
        return self.scale * torch.sign(g)


@dataclass(frozen=True)
class Clip:
    """T(g) = g with every element held between -limit and limit."""

    limit: float

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise HyperparameterError.of(
                given=f"limit={self.limit}", allowed="limit > 0", todo="choose a positive limit"
            )

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return the clipped g."""
        return g.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class Normalize:
    """T(g) = s g / (|g| + eps), with the Euclidean norm of each sample's g (or of all of g)."""

    scale: float = 1.0
    eps: float = 1e-12

    def __call__(self, g: Tensor, site: Site, /) -> Tensor:
        """Return g scaled to length s, sample by sample."""
        layout = site.layout
        viewed = g.reshape(layout.view)
        axes = [axis for axis in range(viewed.dim()) if axis != layout.sample_axis]
        norm = torch.linalg.vector_norm(viewed, dim=axes, keepdim=True) if axes else viewed.abs()
        return (self.scale * viewed / (norm + self.eps)).reshape(g.shape)
