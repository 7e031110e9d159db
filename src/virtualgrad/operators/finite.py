"""Whether all numbers in some tensors are finite, asked of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

Kind = tuple[Any, torch.device, torch.dtype]

SUMMED_IN = {torch.float64: torch.float64, torch.complex128: torch.float64}
"""The dtype in which squares are summed; float32 for all others."""


class FiniteCheck:
    """Which of some tensors hold a NaN or an infinity.

    They are looked at in two stages: :meth:`add` asks for norms, by a few launches for all tensors
    together, and does not wait for them; :meth:`nonfinite` reads them, with one synchronisation
    per device.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._norms: dict[Kind, list[tuple[list[int], Tensor]]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Ask for the norms of some more tensors."""
        by_kind: dict[Kind, list[int]] = {}
        for place, tensor in enumerate(tensors, len(self._tensors)):
            dtype = tensor.dtype
            # A shard has the mesh of the processes that have the others.
            mesh = None if type(tensor) is Tensor else getattr(tensor, "device_mesh", None)
            kind = (mesh, tensor.device, SUMMED_IN.get(dtype, torch.float32))
            by_kind.setdefault(kind, []).append(place)
            is_real = not dtype.is_complex
            self._tensors.append(tensor if is_real else torch.view_as_real(tensor.resolve_conj()))
        for kind, places in by_kind.items():
            each = torch._foreach_norm([self._tensors[place] for place in places], 2, dtype=kind[2])
            self._norms.setdefault(kind, []).append((places, _whole(torch.stack(each))))

    def nonfinite(self) -> list[int]:
        """The places of those that do, in the order in which they were added.

        It may be that only a square overflows, so such a tensor is looked at again. Of shards all
        processes find the same, so that they go the same way from here.
        """
        suspects: list[int] = []
        for asked in self._norms.values():
            norms = asked[0][1] if len(asked) == 1 else torch.cat([norm for _, norm in asked])
            if not isfinite(norms.sum()):
                places = [place for some, _ in asked for place in some]
                pairs = zip(places, norms.tolist(), strict=True)
                suspects += [place for place, norm in pairs if not isfinite(norm)]
        return [
            place
            for place in sorted(suspects)  # as a rule none
            if not bool(_whole(self._tensors[place].isfinite().all()))
        ]


def nonfinite_indices(tensors: Sequence[Tensor]) -> list[int]:
    """Which of some tensors hold a NaN or an infinity; one synchronisation per device."""
    check = FiniteCheck()
    check.add(tensors)
    return check.nonfinite()


def _whole(tensor: Tensor) -> Tensor:
    """The tensor itself; of shards the sum or union, for which all processes must come here."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which squares of g are summed: at least float32."""
    return SUMMED_IN.get(dtype, torch.float32)
