"""A captured CUDA graph, for machines without a GPU: ops on memory that stays, run again later.

As a graph does, it knows nothing of Python: a replay makes the ops that were made while it was
captured, with the same tensors, and leaves their results where the captured ones are. Other than a
graph, it runs the ops once while it captures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from virtualgrad.optim import nonfinite
from virtualgrad.virtual import passes


class Graph(TorchDispatchMode):
    """The ops that were made while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[tuple[Any, Any, dict[str, Any], Any]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """As one of torch's own: others have compiled functions run as they are."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ops.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Make the ops again."""
        for func, args, kwargs, result in self._ops:
            found = func(*args, **kwargs)
            for captured, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                if isinstance(captured, Tensor) and not _shares_memory(captured, new):
                    captured.detach().copy_(new)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@contextmanager
def captured(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Capture what is run within; those who ask are told so."""
    with graph, monkeypatch.context() as patch:
        for module in (nonfinite, passes):
            patch.setattr(module, "is_capturing", lambda: True)
        yield
