"""A kernel that is kept is launched only for arguments of the kind that it was compiled for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from virtualgrad.operators.kernels import Fused, Update, plain
from virtualgrad.operators.launches import Launch
from virtualgrad.operators.tiles import Tile

GRID = (2, 1, 1)


class Kernel:
    """Stands for one of Triton's: notes its launches."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.launches: list[tuple[str, Any, tuple[Any, ...]]] = []
        self.interpreted = interpreted

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, num_warps: int, enable_fp_fusion: bool) -> Any:
            self.launches.append(("looked at", grid, arguments))
            return None if self.interpreted else Compiled(self)

        return run

    def ways(self) -> list[str]:
        return [way for way, _, _ in self.launches]


class Compiled:
    """Stands for what Triton returns of a launch."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.kernel.launches.append(("kept", grid, arguments))


class Like:
    """Stands for a tensor on the GPU of that number."""

    def __init__(self, device: int) -> None:
        self.device = device

    def get_device(self) -> int:
        return self.device


@pytest.fixture
def on_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def launch_of(kernel: Kernel) -> Launch:
    like: Any = Like(0)
    return Launch(kernel, GRID, like, 4)


@pytest.mark.usefixtures("on_first_gpu")
def test_the_second_launch_of_a_kind_is_of_what_was_kept() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    g = torch.zeros(64)
    launch((g, None), (1, 0.5), "first")
    launch((g, None), (1, 0.7), "first")
    launch((g, g), (1, 0.5), "second")
    launch((g, g), (1, 0.5), "second")
    assert kernel.ways() == ["looked at", "kept", "looked at", "kept"]
    assert [(grid, arguments) for _, grid, arguments in kernel.launches] == [
        (GRID, (g, None, 1, 0.5)),
        (GRID, (g, None, 1, 0.7)),
        (GRID, (g, g, 1, 0.5)),
        (GRID, (g, g, 1, 0.5)),
    ]


@pytest.mark.usefixtures("on_first_gpu")
def test_triton_looks_at_tensors_that_lie_elsewhere() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    memory = torch.zeros(64)
    for begin in (1, 0, 1, 0, 4):  # 4 numbers are 16 bytes
        launch((memory[begin:],), ())
    assert kernel.ways() == ["looked at", "looked at", "looked at", "kept", "kept"]


@pytest.mark.usefixtures("on_first_gpu")
def test_only_tensors_that_may_begin_anywhere_are_looked_at() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    memory = torch.zeros(64)
    new, view = memory[2:], memory[1:]  # one is taken for new, whatever it is
    for given in (memory, memory, view, memory):
        launch((given, new), (), None, (given, None))
    launch((new,), (), None, ())
    assert kernel.ways() == ["looked at", "kept", "looked at", "kept", "kept"]


def test_nothing_is_kept_for_another_gpu_nor_by_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, interpreted = Kernel(), Kernel(interpreted=True)
    g = torch.zeros(64)
    launch = launch_of(kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda number: torch.no_grad())
    for current in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        launch((g,), ())
    assert kernel.ways() == ["looked at", "looked at", "kept"]
    on_cpu = Launch(interpreted, GRID, g, 4)
    for _ in range(2):
        on_cpu((g,), ())
    assert interpreted.ways() == ["looked at", "looked at"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_one_kernel_serves_all_kinds_in_any_order() -> None:
    memory = torch.randn(8 * 96 + 8, device="cuda")
    r = torch.rand(96, device="cuda")
    earlier = torch.rand_like(r)
    updates = (Update(1.0, 0.0, 0.5, 1e-3), Update(0.9, 0.3, 2.0, 1e-2), Update(0.5, 0.1, 1, 1e-3))
    fused = Fused(memory[:768].view(8, 96), 0, Tile(8, 32, 1, True))
    kinds = itertools.product((0, 1, 4), (None, earlier), updates)
    for begin, before, update in [*kinds, *itertools.product((0, 1, 4), (None, earlier), updates)]:
        g = memory[begin : begin + 768].view(8, 96)
        out, norm = fused(g, r, before, update)[:2]
        wide = None if before is None else before.double()
        expected, expected_norm = plain(g.double(), r.double(), wide, update, axis=0)[:2]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-5, atol=1e-7)
