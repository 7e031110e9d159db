"""The kernel of compiled passes against plain torch, and where it is used.

There is no GPU where these run as a rule: the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ops_in_torch
import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.operators import kernels_of_norms, launches, rms_op, tiles
from virtualgrad.operators.columns import add_positions_by_torch
from virtualgrad.operators.compiled import Compiled
from virtualgrad.operators.counts import Graphs
from virtualgrad.operators.kernels_of_norms import Norm
from virtualgrad.operators.rms_op import Kept

SHAPES = [(6, 3, 10), (1, 40), (128, 2, 33), (200, 70)]
CHANNELS_LAST = (5, 16, 6, 4)
SAMPLES = 4  # of which the rows are; some may have more, some none
NUMBERS = (0.5, 0.8, 1e-3, 8.0)  # s, rho, eps and the factor of the loss


class Way(NamedTuple):
    """Whether T goes by the r of before, and whether g is to be that of one sample's loss."""

    stale: bool
    unit_is_sample: bool


WAYS = [Way(stale, unit) for stale in (False, True) for unit in (False, True)]


READINGS: list[dict[str, bool]] = [
    {},
    {"stale": True},
    {"share_positions": True},
    {"share_positions": True, "stale": True},
    {"per_sample": False},
]


def site(g: Tensor, seed: int) -> Compiled:
    torch.manual_seed(seed)
    r = torch.rand_like(g[0], dtype=torch.float32)
    return Compiled(r, None, Graphs(r, "graph0"))


def by_torch(kept: Compiled, g: Tensor, way: Way) -> Tensor:
    """The oracle: T(g), by what compiled passes do elsewhere."""
    scale, rho, eps, loss_scale = NUMBERS
    updated = kept.add(
        g,
        (0,),
        counts=(g.shape[0], SAMPLES),
        rho=torch.tensor(rho, dtype=torch.float64),
        loss_scale=loss_scale,
        unit_is_sample=way.unit_is_sample,
        graph=kept.graphs.number,
    )
    r = kept.r if way.stale else updated
    return (g * scale * torch.rsqrt(r + eps)).to(g.dtype)


def for_op(kept: Compiled, g: Tensor, way: Way) -> Kept:
    numbers = torch.tensor(NUMBERS, dtype=torch.float64, device=g.device)
    counts = (g.shape[0], SAMPLES)
    return kept.for_op(numbers, kept.graphs.number, counts=counts, **way._asdict())


def launched(kernel: Any, g: Tensor, launch: launches.OpLaunch) -> None:
    launches.launch(kernel[launch.grid], g.get_device(), launch.arguments, launch.warps)


def by_kernel(kept: Compiled, g: Tensor, way: Way) -> Tensor:
    """The same by the launch that the op makes; where it sums, too, it is checked here."""
    from virtualgrad.operators import candidate_kernel

    before = kept.candidate.clone()
    plain, sums, launch = rms_op.launch_of_transform(g, for_op(kept, g, way))
    assert sums is None
    launched(candidate_kernel.transform_and_write, g, launch)
    for total in ("g", "T(g)"):
        out, sums, launch = rms_op.launch_of_transform(g, for_op(kept, g, way), total)
        if sums is None:  # channels-last: the last axis is not that of the channels
            assert kept.r.stride(-1) != 1
            continue
        candidate = kept.candidate.clone()
        kept.candidate.copy_(before)
        launched(candidate_kernel.transform_and_write, g, launch)
        rounded = 1e-6 if g.dtype == torch.float32 else 2**-7  # the last bit may be another
        torch.testing.assert_close(out, plain, rtol=rounded, atol=1e-7)
        torch.testing.assert_close(kept.candidate, candidate, rtol=1e-6, atol=0, equal_nan=True)
        added = g.double() if total == "g" else out.double()
        rounded = 2e-6 if total == "g" else 2 * rounded
        found = add_positions_by_torch(sums, g.shape[-1], last=True)[0]
        sizes = added.abs().flatten(0, -2).sum(0)
        assert ((found - added.flatten(0, -2).sum(0)).abs() <= rounded * sizes + 1e-6).all()
    out = plain
    kept.count(g.shape[0], SAMPLES, kept.graphs.number)
    return out


def compare(device: str, shape: tuple[int, ...], way: Way, dtype: torch.dtype) -> None:
    g = torch.randn(shape, device=device).to(dtype)
    if shape == CHANNELS_LAST:
        g = g.contiguous(memory_format=torch.channels_last)
    ours, theirs = site(g, 1), site(g, 1)
    exact = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for number in range(3):  # three micro-batches
        g = g * (number + 1)
        found, expected = by_kernel(ours, g, way), by_torch(theirs, g, way)
        assert found.stride() == g.stride()
        torch.testing.assert_close(found, expected, rtol=exact, atol=1e-6)
        torch.testing.assert_close(ours.candidate, theirs.candidate, rtol=1e-5, atol=1e-6)
        assert torch.equal(ours.counts, theirs.counts)
        for kept in (ours, theirs):
            kept.graphs.begin(first=False)
    for kept in (ours, theirs):  # and one that goes through a graph of before once more
        kept.graphs.begin(first=True)
    found, expected = by_kernel(ours, g, way), by_torch(theirs, g, way)
    assert ours.has_counted_twice()
    assert ours.candidate.isnan().all()
    torch.testing.assert_close(found, expected, rtol=exact, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, CHANNELS_LAST], ids=str)
def check_by_the_oracle(shape, way):
    compare("cpu", shape, way, torch.float32)


@pytest.mark.parametrize("way", WAYS, ids=str)
def check_half_precision(way):
    compare("cpu", (6, 3, 10), way, torch.bfloat16)
    compare("cpu", (6, 3, 10), way, torch.float16)


@pytest.mark.parametrize("way", WAYS, ids=str)
def check_rows_that_are_walked_over(way, monkeypatch):
    tile = tiles.Tile(4, 16, 1, False)
    monkeypatch.setattr(tiles, "choose_tile", lambda *_, **__: tile)
    compare("cpu", (19, 3, 10), way, torch.float32)


def compare_rows_of_another_length(
    device: str, shape: tuple[int, ...], way: Way, dtype: torch.dtype
):
    """The same numbers as in rows like those of g, and of the candidate."""
    from virtualgrad.operators import candidate_kernel

    torch.manual_seed(0)
    g = torch.randn(shape, device=device).to(dtype)
    found = []
    for pitch in (0, shape[-1] + 3):
        kept = site(g, 1)
        out, _, launch = rms_op.launch_of_transform(g, for_op(kept, g, way), "", pitch)
        launched(candidate_kernel.transform_and_write, g, launch)
        assert out.shape == (*shape[:-1], pitch or shape[-1])
        found.append((out[..., : shape[-1]], kept.candidate))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("whole", [False, True])
def check_rows_of_another_length(way, whole, monkeypatch):
    tile = tiles.Tile(8, 16, 1, True) if whole else tiles.Tile(4, 16, 1, False)
    monkeypatch.setattr(tiles, "choose_tile", lambda *_, **__: tile)
    compare_rows_of_another_length("cpu", (7, 3, 10), way, torch.float32)


def check_rows_that_do_not_lie_behind_each_other_stay_as_they_are():
    g = torch.randn(5, 16, 6, 4).contiguous(memory_format=torch.channels_last)
    out, _, _ = rms_op.launch_of_transform(g, for_op(site(g, 1), g, WAYS[0]), "", 8)
    assert out.shape == g.shape


def check_a_gradient_that_lies_otherwise_is_laid_out_as_r():
    g = torch.randn(5, 16, 6, 4)
    kept = site(g.contiguous(memory_format=torch.channels_last), 1)
    found = by_kernel(kept, g, WAYS[0])
    expected = by_torch(site(g.contiguous(memory_format=torch.channels_last), 1), g, WAYS[0])
    torch.testing.assert_close(found, expected)


def compare_norm_sums(device: str, shape: tuple[int, ...], way: Way) -> None:
    from virtualgrad.operators import norm_kernel, sums_kernel

    torch.manual_seed(0)
    both = torch.randn(2, *shape, device=device).unbind()
    x, g = (t.contiguous(memory_format=torch.channels_last) for t in both)
    channels = shape[1]
    norm = Norm(x, *torch.rand(3, channels, device=device).unbind())
    ours, theirs = site(g, 1), site(g, 1)
    for _ in range(2):  # micro-batches
        sums, launch = rms_op.launch_of_norm_sums(g, *norm[:3], for_op(ours, g, way))
        launched(norm_kernel.norm_sums_and_write, g, launch)
        expected = ops_in_torch.norm_sums(g, norm, for_op(theirs, g, way))
        added = rms_op.launch_of_totals(sums, channels)
        assert added is not None
        found, launch = added
        launched(sums_kernel.add_positions, g, launch)
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.candidate, theirs.candidate, rtol=1e-5, atol=1e-6)
        for kept in (ours, theirs):
            kept.count(g.shape[0], g.shape[0], kept.graphs.number)
            kept.graphs.begin(first=False)


@pytest.mark.parametrize("most", [2, 5, 1000])
@pytest.mark.parametrize("way", WAYS, ids=str)
def check_sums_of_a_batch_norm(way, most, monkeypatch):
    monkeypatch.setattr(kernels_of_norms, "MOST_PROGRAMS", most)  # of 32 columns each
    compare_norm_sums("cpu", (70, 6, 9, 5), way)


@pytest.mark.parametrize("shape", [(4, 3, 16), (3000, 24), (2, 200, 8)], ids=str)
@pytest.mark.parametrize("is_summed", [False, True])
def check_parts_of_squares(shape, is_summed):
    from virtualgrad.operators import sums_kernel

    g = torch.randn(shape)
    parts, launch = rms_op.launch_of_squares(g, is_summed=is_summed)
    launched(sums_kernel.part_squares, g, launch)
    rows = g.flatten(0, -2)
    expected = [rows.square().sum(0), rows.sum(0)][: 1 + is_summed]
    torch.testing.assert_close(parts.sum(1), torch.stack(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@needs_triton
def test_the_kernels_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, CHANNELS_LAST, (128, 197, 384)], ids=str)
def test_the_kernel_on_a_gpu(shape: tuple[int, ...], way: Way, dtype: torch.dtype) -> None:
    compare("cuda", shape, way, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", [(70, 6, 5, 3), (128, 16, 32, 32), (40, 16, 64, 64)], ids=str)
def test_sums_of_a_batch_norm_on_a_gpu(shape: tuple[int, ...], way: Way) -> None:
    compare_norm_sums("cuda", shape, way)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reading", READINGS, ids=str)
@pytest.mark.parametrize("kind", ["tokens", "images"])
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")  # not wanted here
def test_compiled_with_the_ops_as_eager(kind: str, reading: dict[str, bool], dynamic: bool) -> None:
    """In float32; eager passes go by kernels that are held to plain torch elsewhere."""
    torch._dynamo.reset()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = [trained(kind, compiled, dynamic, **reading) for compiled in (False, True)]
    for eager, by_ops in zip(*found, strict=True):
        scale = eager.abs().max()
        torch.testing.assert_close(by_ops / scale, eager / scale, rtol=0, atol=1e-4)


def trained(kind: str, compiled: bool, dynamic: bool, **reading: bool) -> list[Tensor]:
    """Gradients and r of three steps, the second of two micro-batches."""
    torch.manual_seed(0)
    if kind == "tokens":
        layers = (nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 513))
        inputs = (7, 24)
    else:
        first = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        layers = (*first, nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh())
        inputs = (3, 9, 9)
    order = torch.channels_last if kind == "images" else torch.contiguous_format
    model = nn.Sequential(*layers).to("cuda", memory_format=order)  # type: ignore[call-overload]
    optimizer = SVGD(model, 0.01, **reading)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic) if compiled else model
    found: list[Tensor] = []
    for batch, passes in ((6, 1), (6, 2), (6 + 3 * dynamic, 1)):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(batch, *inputs, device="cuda").to(memory_format=order)
            run(x).pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    state = optimizer.operator.state
    return found + [state[key]["r"] for key in sorted(state)]


def test_no_op_on_a_cpu() -> None:
    assert not rms_op.is_usable(torch.device("cpu"))
