"""Whether all numbers in some tensors are finite, asked of many at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.native import built

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
    bit changes. What it does not take (shards, complex numbers) is looked at by its norm. Where
    :mod:`virtualgrad.native` was built, it looks, at tensors of one kind.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._found: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        self._norms: dict[Kind, list[tuple[list[int], Tensor]]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Look at some more tensors."""
        if not tensors:
            return
        first = len(self._tensors)
        self._tensors += tensors
        library = None if torch.compiler.is_compiling() else built()
        at_once = None if library is None else library.look(tensors)
        if at_once is not None:
            places = list(range(first, first + len(tensors)))
            self._found.setdefault(at_once.device, []).append((places, at_once))
            return
        others: list[int] = []
        for group in _alike(tensors):
            found = _look([tensors[place] for place in group])
            places = [first + place for place in group]
            if found is None:
                others += places
            else:
                self._found.setdefault(found.device, []).append((places, found))
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


def _alike(tensors: Sequence[Tensor]) -> Iterable[Sequence[int]]:
    """The places of tensors that can be looked at together, or not at all."""
    if _are_all_alike(tensors):
        return [range(len(tensors))]
    groups: dict[tuple[int, torch.dtype] | None, list[int]] = {}
    for place, each in enumerate(tensors):
        kind = (each.get_device(), each.dtype) if type(each) in PLAIN else None
        groups.setdefault(kind, []).append(place)
    return groups.values()


def _are_all_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all are plain tensors of one device and dtype, as they are as a rule.

    By the number of the device, as the GradScaler does: it is made sooner than a device.
    """
    return (
        len({each.get_device() for each in tensors}) == 1
        and len({each.dtype for each in tensors}) == 1
        and set(map(type, tensors)).issubset(PLAIN)
    )


def _look(tensors: list[Tensor]) -> Tensor | None:
    """One if some tensor is not finite, else zero; None where that cannot be asked."""
    some = tensors[0]
    if type(some) not in PLAIN or not some.is_floating_point():
        return None
    # In float32, whatever the default is: it takes no other.
    found = torch.zeros(1, dtype=torch.float32, device=some.device)
    one = torch.ones(1, dtype=torch.float32, device=some.device)
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


@settled_while_tracing
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which squares of g are summed: at least float32."""
    return SUMMED_IN.get(dtype, torch.float32)
