"""Pairs of tensors for one of torch's foreach functions, in pieces that fill a GPU.

A foreach function gives each 65,536 numbers of a tensor to one block of threads. A network of a few
hundred thousand parameters has few such blocks, and most of the chip is idle: an update takes 9 us
where 3 would do. In pieces it is busy, and every number is what it was.

Pieces are views, and take the host longer to make than a GPU gains. So they are made where a CUDA
graph is captured: its replays ask no host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from virtualgrad.compiling import is_capturing
from virtualgrad.operators.finite import PLAIN
from virtualgrad.operators.kernels import are_dense

PIECE = 8192  # numbers
MOST = 2**20  # numbers in all; more fill the chip as they are


def in_pieces(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Two lists of tensors, pairwise of one shape, as lists of views that are pairwise so."""
    if not targets or not _fill_too_little(targets):
        return list(targets), list(sources)
    pieces: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in zip(targets, sources, strict=True):
        split = _may_be_split(*pair)
        for found, tensor in zip(pieces, pair, strict=True):
            found.extend(_flat(tensor).split(PIECE) if split else [tensor])
    return pieces


def _fill_too_little(tensors: Sequence[Tensor]) -> bool:
    """Whether a graph is captured, of few numbers."""
    if torch.compiler.is_compiling() or not tensors[0].is_cuda or not is_capturing():
        return False
    return sum(tensor.numel() for tensor in tensors) <= MOST


def _may_be_split(target: Tensor, source: Tensor) -> bool:
    """Whether two tensors are long, and lie in memory alike and without gaps."""
    is_plain = type(target) in PLAIN and type(source) in PLAIN
    if target.numel() <= PIECE or not is_plain or source.is_sparse:
        return False
    if target.shape != source.shape or target.stride() != source.stride():
        return False
    return are_dense(target, [axis for axis in range(target.dim()) if target.shape[axis] > 1])


def _flat(tensor: Tensor) -> Tensor:
    """The numbers of a tensor without gaps, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
