"""The commit of r by C++, on a CPU: to the bits of torch's ops, or left to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgrad import SVGD, native
from virtualgrad.operators.numbers import add_to_all, multiply_all

SIZES = [(1,), (3,), (8,), (31,), (64,), (257,), (4, 5, 6), (0,)]
RHO, WEIGHT, EPS = 0.9, 0.0123, 1e-6


def library() -> Any:
    return native.built()


@pytest.fixture(autouse=True)
def known_here(in_cpp: None) -> None:
    if library().rounds_once() is None:
        pytest.skip("this torch rounds as C++ does not: its ops stay")


def some(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Numbers of all sizes, small ones and large ones."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.rand(size, generator=generator, dtype=dtype) for size in SIZES]
    return [each.mul_(10.0 ** (place - 4)) for place, each in enumerate(found)]


@pytest.mark.parametrize("factor_of", [None, (1.0, EPS), (0.3, EPS), (2, 0.0)])
@pytest.mark.parametrize("rho", [RHO, 0.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_to_the_bits_of_torchs_ops(
    seed: int, rho: float, factor_of: tuple[float, float] | None
) -> None:
    means, norms = some(seed), some(seed + 100)
    weights = [WEIGHT * (place + 1) for place in range(len(means))]
    factors = [torch.zeros_like(r) for r in means] if factor_of else []
    expected = [r.clone() for r in means]
    multiply_all(expected, rho, torch.float32)
    torch._foreach_addcmul_(expected, norms, norms, weights)
    made = [r.clone() for r in expected]
    versions = [each._version for each in (*means, *factors)]
    assert library().commit(means, norms, weights, rho, factors, factor_of)
    assert all(map(torch.equal, means, expected))
    if factor_of is not None:
        s, eps = factor_of
        add_to_all(made, eps, torch.float32)
        torch._foreach_rsqrt_(made)
        if s != 1:
            multiply_all(made, s, torch.float32)
        assert all(map(torch.equal, factors, made))
    pairs = zip((*means, *factors), versions, strict=True)
    assert all(each._version > before for each, before in pairs)  # as autograd is told by ops


class Watching(TorchDispatchMode):
    """Wants to see every op."""

    ops = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return op(*args, **kwargs or {})


def refused() -> dict[str, tuple[Tensor, Tensor]]:
    r = torch.rand(6, 8)
    return {
        "double": (r.double(), r.double()),
        "half": (r.half(), r.half()),
        "of two kinds": (r, r.double()),
        "gaps": (r[:, ::2], r[:, ::2].contiguous()),
        "transposed": (r.t(), r.t()),
        "many": (torch.rand(32768), torch.rand(32768)),
        "another size": (r, torch.rand(8, 6)),
    }


@pytest.mark.parametrize("kind", refused())
def test_all_else_is_left_to_torch_and_nothing_is_done(kind: str) -> None:
    r, norm = refused()[kind]
    first, before = torch.rand(3), r.clone()
    unchanged = first.clone()
    done = library().commit([first, r], [first, norm], [0.1, 0.1], RHO, [], None)
    assert not done
    assert torch.equal(first, unchanged)
    assert torch.equal(r, before)


def test_modes_see_the_ops() -> None:
    r = torch.rand(3)
    with Watching():
        assert not library().commit([r], [r], [0.1], RHO, [], None)


def test_lists_of_other_lengths_are_errors() -> None:
    r = [torch.rand(3), torch.rand(3)]
    with pytest.raises(RuntimeError, match="a commit of 2 sites got 1"):
        library().commit(r, r[:1], [0.1, 0.1], RHO, [], None)
    with pytest.raises(RuntimeError, match="a weight for each site"):
        library().commit(r, r, [0.1], RHO, [], None)


@pytest.mark.parametrize("sizes", [(4, 6), (33, 257), (300, 43), (70, 7), (64, 64), (8, 9, 10)])
def test_sums_are_those_of_torch_here(sizes: tuple[int, ...]) -> None:
    """Or else T is made by its ops, and more slowly: to be known when torch sums otherwise."""
    assert library().sums_as_torch(sizes, [0])
    assert library().sums_as_torch(sizes, [0])  # as it is kept


def test_many_numbers_are_left_to_threads() -> None:
    assert not library().sums_as_torch((256, 128), [0])


def test_other_modes_do_not_see_how_torch_is_asked() -> None:
    model = nn.Linear(5, 11)
    optimizer = SVGD(model, 0.1)
    ops: list[int] = []
    for _ in range(4):
        optimizer.zero_grad()
        with Watching() as watching:
            model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
        ops.append(watching.ops)
    assert max(ops) <= ops[0]


def trained(model: nn.Module, optimizer: SVGD) -> list[Tensor]:
    for seed in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    r = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    return [*(p.detach() for p in model.parameters()), *r]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 3))


@pytest.mark.parametrize(
    "options", [{"stale": True}, {"stale": False}, {"stale": True, "scale": 2, "rho": 0}]
)
def test_training(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[bool] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            found = getattr(library(), name)
            if name != "commit":
                return found
            return lambda *args: commits.append(found(*args)) or commits[-1]  # type: ignore[func-returns-value]

    def noting() -> Any:
        return Noting()

    with monkeypatch.context() as patch:
        patch.setattr("virtualgrad.optim.descent.step_on_cpu", lambda *_, **__: False)
        patch.setattr("virtualgrad.operators.running.built", noting)
        model = network()
        ours = trained(model, SVGD(model, 0.1, **options))
        assert commits and all(commits)
        patch.setattr("virtualgrad.operators.running.built", lambda: None)
        model = network()
        theirs = trained(model, SVGD(model, 0.1, **options))
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
