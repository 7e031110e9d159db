"""Whether all numbers in some tensors are finite, asked of many at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)
"""Types of tensors with a memory of their own, not shards."""

Kind = tuple[Any, torch.device, torch.dtype]

SUMMED_IN = {torch.float64: torch.float64, torch.complex128: torch.float64}
"""The dtype in which squares are summed; float32 for all others."""


class FiniteCheck:
    """Which of some tensors hold a NaN or an infinity.

    They are looked at in two stages: :meth:`add` looks at all of them together, by a launch for
    each device and dtype, and does not wait; :meth:`nonfinite` asks for the answer, with one
    synchronisation per device, and, if there is such a tensor, for which it is.

    The look is the one of torch.amp's GradScaler, which also divides by a factor, here one: not a
    bit changes. What it does not take (shards, complex numbers) is looked at by its norm.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._found: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        self._norms: dict[Kind, list[tuple[list[int], Tensor]]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Look at some more tensors."""
        # By the number of the device, as the GradScaler does: it is made sooner than a device.
        kinds = [
            (each.get_device(), each.dtype) if type(each) in PLAIN else None for each in tensors
        ]
        alike: dict[tuple[int, torch.dtype] | None, list[int]] = {}
        for place, kind in enumerate(kinds, len(self._tensors)):
            alike.setdefault(kind, []).append(place)
        others: list[int] = []
        self._tensors += tensors
        for kind, group in alike.items():
            device = self._tensors[group[0]].device
            found = None
            if kind is not None and kind[1].is_floating_point:
                found = _look([self._tensors[place] for place in group], device)
            if found is None:
                others += group
            else:
                self._found.setdefault(device, []).append((group, found))
        if others:
            self._ask_for_norms(others)

    def _ask_for_norms(self, places: Sequence[int]) -> None:
        by_kind: dict[Kind, list[int]] = {}
        for place in places:
            tensor = self._tensors[place]
            # A shard has the mesh of the processes that have the others.
            mesh = None if type(tensor) is Tensor else getattr(tensor, "device_mesh", None)
            kind = (mesh, tensor.device, SUMMED_IN.get(tensor.dtype, torch.float32))
            by_kind.setdefault(kind, []).append(place)
            if tensor.is_complex():
                self._tensors[place] = torch.view_as_real(tensor.resolve_conj())
        for kind, together in by_kind.items():
            each = torch._foreach_norm([self._tensors[at] for at in together], 2, dtype=kind[2])
            self._norms.setdefault(kind, []).append((together, _whole(torch.stack(each))))

    def nonfinite(self) -> list[int]:
        """The places of those that do, in the order in which they were added.

        It may be that only a square overflows, so a tensor is looked at again. Of shards all
        processes find the same, so that they go the same way from here.
        """
        suspects: list[int] = []
        for looked_at in self._found.values():
            found = [each for _, each in looked_at]
            if float(found[0] if len(found) == 1 else torch.cat(found).sum()):
                suspects += [place for places, _ in looked_at for place in places]
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


def _look(tensors: list[Tensor], device: torch.device) -> Tensor | None:
    """One if some tensor is not finite, else zero; None where that cannot be asked."""
    found, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)
    except RuntimeError:  # a dtype or a device that it does not know, an expanded gradient
        return None
    return found


def _whole(tensor: Tensor) -> Tensor:
    """The tensor itself; of shards the sum or union, for which all processes must come here."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which squares of g are summed: at least float32."""
    return SUMMED_IN.get(dtype, torch.float32)
