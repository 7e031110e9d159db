"""The running means of all sites, by the key of the site."""

from __future__ import annotations

import torch
from torch import Tensor

from virtualgrad.compiling import settled_while_tracing
from virtualgrad.operators.compiled import Compiled
from virtualgrad.operators.counts import Graphs
from virtualgrad.operators.finite import accumulation_dtype
from virtualgrad.operators.kernels import MOST_COLUMNS, are_dense
from virtualgrad.operators.running import Running

Kind = tuple[torch.device, torch.dtype]


class RunningSites:
    """Site -> what is kept for it.

    What compiled passes keep stands in attributes of its own: a compiler reads attributes as they
    are at that moment, also those that were made while it was tracing.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Running] = {}
        self._names: dict[str, str] = {}  # site -> its attribute, for good
        self._graphs: dict[Kind, Graphs] = {}

    def find_or_begin(self, key: str, like: Tensor, dtype: torch.dtype) -> Running:
        """What is kept for a site, on its device; zeros, laid out as ``like``, for a new one."""
        running = self.kept.get(key)
        if running is None:
            r = torch.zeros_like(like, dtype=accumulation_dtype(dtype))
            running = self.kept[key] = Running(r, committed=False)
        elif running.r.device != like.device:  # the model has moved
            moved = running.r.to(like.device)
            running = self.kept[key] = Running(moved, committed=running.committed)
        return running

    @settled_while_tracing
    def shape_of(self, key: str) -> tuple[int, ...] | None:
        """Shape of a site's r, if it has one."""
        running = self.kept.get(key)
        return None if running is None else tuple(running.r.shape)

    @settled_while_tracing
    def begin_compiled(  # noqa: PLR0917 - what a compiler can pass
        self,
        key: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        gradient_shape: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> str:
        """Make room for a site when a pass through it is traced; the name of the attribute."""
        order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
        back = [order.index(axis) for axis in range(len(shape))]
        like = torch.empty([shape[axis] for axis in order], device=device).permute(back)
        running = self.find_or_begin(key, like, dtype)
        if running.compiled is None:
            gradient = None
            if gradient_shape is not None:
                summed_in = dtype if dtype.is_complex else accumulation_dtype(dtype)
                gradient = torch.zeros(gradient_shape, dtype=summed_in, device=device)
            running.compiled = Compiled(running.r, gradient, self._graphs_of(running.r))
            running.hand_over()
        name = self._names.setdefault(key, f"site{len(self._names)}")
        setattr(self, name, running.compiled)
        return name

    @settled_while_tracing
    def suits_kernels(self, key: str) -> bool:
        """Whether the r of a site that was begun is as kernels want it: float32, without gaps."""
        r = self.kept[key].r
        dense = are_dense(r, [axis for axis in range(r.dim()) if r.shape[axis] > 1])
        return dense and r.dtype == torch.float32 and r.numel() < MOST_COLUMNS

    @settled_while_tracing
    def has_channels_innermost(self, key: str) -> bool:
        """Whether the channels of an r of (channels, ...) lie next to each other."""
        r = self.kept[key].r
        return r.shape[0] == 1 or r.stride(0) == 1

    def _graphs_of(self, r: Tensor) -> Graphs:
        """The numbers of graphs for a new site."""
        kind = (r.device, r.dtype)
        if kind not in self._graphs:
            self._graphs[kind] = Graphs(r, f"graph{len(self._graphs)}")
            self._show(self._graphs[kind])
        return self._graphs[kind]

    # ---------------------------------------------------------------- which graph it is

    @settled_while_tracing
    def graph_at(self, key: str) -> str:
        """The attribute that has the number of the present graph for a site that was begun."""
        compiled = self.kept[key].compiled
        assert compiled is not None
        return compiled.graphs.name

    def begin_graph(self, *, first: bool) -> None:
        """The compiled passes that begin from now on belong to another graph."""
        for graphs in self._graphs.values():
            graphs.begin(first=first)
            self._show(graphs)

    def counted_twice(self) -> list[str]:
        """Sites that two compiled passes through one graph have reached; the host waits."""
        pairs = [(key, running.compiled) for key, running in self.kept.items()]
        return [key for key, kept in pairs if kept is not None and kept.has_counted_twice()]

    def _show(self, graphs: Graphs) -> None:
        setattr(self, graphs.name, graphs.number)
