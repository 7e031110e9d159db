"""The weight gradient of a convolution by kernels against plain torch, and where they are used.

There is no GPU where these run as a rule: the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor, nn

from virtualgrad import SVGD
from virtualgrad.operators import kernels_of_weights, launches, rms_fused, weights_op
from virtualgrad.operators.channels import Convolved, Window
from virtualgrad.operators.kernels_of_weights import (
    STAGES,
    WeightGradient,
    plain,
    prepare_weight,
)
from virtualgrad.operators.weight_tiles import (
    Layer,
    WeightTile,
    choose_weight_tile,
    is_worth,
    tile_of_parts,
)

NUMBERS = (0.5, 0.8, 1e-3, 8.0)  # s, rho, eps and the factor of the loss


class Convolution(NamedTuple):
    """Samples, channels of sigma and of x, height and width of x, and of the weight; its window."""

    m: int
    channels: int
    k: int
    image: tuple[int, int]
    kernel: tuple[int, int]
    window: Window


ONE, NONE = (1, 1), (0, 0)
CONVOLUTIONS = [
    Convolution(5, 16, 16, (8, 7), (3, 3), Window(ONE, ONE, ONE)),
    Convolution(4, 3, 3, (9, 9), (3, 3), Window(ONE, ONE, ONE)),
    Convolution(3, 20, 8, (9, 8), (3, 2), Window((2, 1), (1, 0), (1, 2))),
    Convolution(9, 40, 24, (5, 5), (1, 1), Window(ONE, NONE, ONE)),
    Convolution(2, 24, 5, (7, 6), (1, 1), Window((2, 2), NONE, ONE)),
    Convolution(1, 1, 1, (6, 6), (5, 5), Window((2, 3), (2, 2), ONE)),
]


def drawn(case: Convolution, device: str, dtype: torch.dtype) -> tuple[Tensor, Convolved, Tensor]:
    """g, what sigma was made of, and r."""
    torch.manual_seed(0)
    x = torch.randn(case.m, case.k, *case.image, device=device)
    weight = torch.randn(case.channels, case.k, *case.kernel, device=device)
    g = torch.randn_like(torch.conv2d(x, weight, None, *case.window))
    r = torch.rand(*g.shape[2:], case.channels, device=device).permute(2, 0, 1)
    order = torch.channels_last
    g, x = (one.to(dtype).contiguous(memory_format=order) for one in (g, x))
    return g, Convolved(x, case.kernel, case.window), r


def by_launches(
    g: Tensor, convolved: Convolved, r: Tensor | None, *, with_squares: bool
) -> tuple[Tensor, Tensor | None]:
    """By the launches that the op makes."""
    from virtualgrad.operators import weight_kernel

    numbers = torch.tensor(NUMBERS, dtype=torch.float64, device=g.device)
    given = None if r is None else numbers
    made = weights_op.launches_of_weight(g, convolved, r, given, with_squares=with_squares)
    for empty in (made.weight, made.squares, made.addition.arguments[0]):
        if empty is not None:
            empty.fill_(torch.nan)  # all of it is to be written
    both = (weight_kernel.weight_parts, made.product), (weight_kernel.add_parts, made.addition)
    for kernel, (grid, arguments, warps) in both:
        launches.launch(kernel[grid], g.get_device(), arguments, warps)
    return made.weight, made.squares


def compare(case: Convolution, device: str, dtype: torch.dtype, exact: float) -> None:
    """The kernels and the oracle in float64: under T, and where T only sees g."""
    g, convolved, r = drawn(case, device, dtype)
    scale, _, eps, _ = NUMBERS
    wide = convolved._replace(x=convolved.x.double())
    for given, with_squares in ((r, True), (r, False), (None, True)):
        factor = None if given is None else scale * torch.rsqrt(given.double() + eps)
        expected, q, _, _ = plain(g.double(), wide, factor)
        weight, squares = by_launches(g, convolved, given, with_squares=with_squares)
        assert weight.shape == expected.shape
        assert weight.dtype == dtype
        assert (weight.double() - expected).norm() <= exact * expected.norm()
        assert (squares is not None) == with_squares
        if squares is not None:
            torch.testing.assert_close(squares.double().sum(0), q, rtol=1e-5, atol=1e-6)
    compare_eager(case, device, dtype, exact)


def compare_eager(case: Convolution, device: str, dtype: torch.dtype, exact: float) -> None:
    """The same as eager passes have it: with a bias or without, after earlier passes or not."""
    g, convolved, r = drawn(case, device, dtype)
    scale, _, eps, _ = NUMBERS
    wide = convolved._replace(x=convolved.x.double())
    expected, q, of_g, of_product = plain(g.double(), wide, scale * torch.rsqrt(r.double() + eps))
    for total, of in ((None, None), ("g", of_g), ("T(g)", of_product)):
        fused = WeightGradient(g, convolved, total)
        for earlier in (None, torch.rand_like(r), torch.rand(r.shape, device=device)):
            made = fused(g, convolved.x, r, earlier, (scale, eps))
            assert (made.weight.double() - expected).norm() <= exact * expected.norm()
            squares = q if earlier is None else q + earlier.double().square()
            torch.testing.assert_close(made.norm.double(), squares.sqrt(), rtol=1e-5, atol=1e-6)
            assert made.norm.stride() == r.stride()
            assert (made.total is None) == (of is None)
            if of is not None:
                assert (made.total.double() - of).norm() <= 1e-5 * g.double().norm() * g.shape[0]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def check_by_the_oracle(case):
    compare(case, "cpu", torch.float32, 1e-6)


def check_half_precision():
    """Of float16; products in bfloat16 are not known to the interpreter."""
    compare(CONVOLUTIONS[1], "cpu", torch.float16, 2**-10)


@pytest.mark.parametrize(("positions", "splits"), [(16, 1), (64, 2), (32, 6)])
def check_any_tile(positions, splits, monkeypatch):
    """Also one with a share of no samples."""
    tile = WeightTile(positions, 16, 32, splits, 4)
    monkeypatch.setattr(kernels_of_weights, "choose_weight_tile", lambda *_: tile)
    monkeypatch.setattr(kernels_of_weights, "tile_of_parts", lambda *_: (4, 32))
    compare(CONVOLUTIONS[2], "cpu", torch.float32, 1e-6)


def check_an_r_and_a_g_that_lie_otherwise():
    g, convolved, r = drawn(CONVOLUTIONS[0]._replace(m=16), "cpu", torch.float32)
    assert prepare_weight(g, r, (0,), convolved, None) is not None
    expected, _ = by_launches(g, convolved, r, with_squares=False)
    elsewhere = convolved._replace(x=convolved.x.contiguous())
    found, _ = by_launches(g.contiguous(), elsewhere, r.contiguous(), with_squares=False)
    assert torch.equal(found, expected)
    assert prepare_weight(g.contiguous(), r.contiguous(), (0,), convolved, None) is None
    assert prepare_weight(g, r, (0,), elsewhere, None) is None
    assert prepare_weight(g, r, (0, 2, 3), convolved, None) is None
    assert prepare_weight(g.double(), r, (0,), convolved, None) is None


def check_padding_of_a_tile_is_no_number():
    """Where eps is nothing in float32, a place beyond the last one must not divide by it."""
    case = CONVOLUTIONS[0]
    g, convolved, r = drawn(case, "cpu", torch.float32)
    made = WeightGradient(g, convolved, "T(g)")(g, convolved.x, r + 0.1, None, (1.0, 1e-46))
    assert made.weight.isfinite().all()
    assert made.total.isfinite().all()


@pytest.mark.parametrize("where", ["everywhere", "weights"])
@pytest.mark.parametrize("bias", [False, True])
def check_steps_with_the_kernels_and_without(bias, where, monkeypatch):
    """Of SVGD with the r of before: gradients and r, the second step of two micro-batches."""
    asked = []

    def watched(*args):
        asked.append(prepare_weight(*args))
        return asked[-1]

    monkeypatch.setattr(rms_fused, "prepare_weight", watched)
    options = {"where": lambda site: site.roles == ("weight",)} if where == "weights" else {}
    found = stepped(bias, **options)
    assert any(asked)  # on a CPU, torch leaves the images of the other layer otherwise
    monkeypatch.setattr(rms_fused, "prepare_weight", lambda *_: None)
    for one, other in zip(found, stepped(bias, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def stepped(bias: bool, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 5, 3, bias=bias), nn.Tanh(), nn.Conv2d(5, 4, 1, bias=bias)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    optimizer = SVGD(model, 1e-6, stale=True, **options)
    found: list[Tensor] = []
    for passes in (1, 2):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(16, 3, 6, 7).to(memory_format=torch.channels_last)
            model(x).pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    state = optimizer.operator.state
    return found + [state[key]["r"] for key in sorted(state)]


@pytest.mark.slow
@needs_triton
def test_the_kernels_in_the_interpreter() -> None:
    run_checks(__file__)


LAYERS = [  # of ResNet-20 and ResNet-50: positions, channels, those of x, and of its window
    (1024, 16, 16, 144),
    (64, 64, 64, 576),
    (12544, 64, 3, 147),
    (3136, 256, 64, 64),
    (784, 512, 128, 128),
    (196, 1024, 256, 256),
    (49, 512, 512, 4608),
    (196, 384, 3, 768),
]


@pytest.mark.parametrize(
    ("bytes_each", "writes", "many"), [(2, True, 5), (4, True, 4), (2, False, 4), (4, False, 3)]
)
def test_where_it_is_worth_it(bytes_each: int, writes: bool, many: int) -> None:
    """As it was measured on an H200."""
    found = [is_worth(Layer(128, *layer, bytes_each), writes=writes) for layer in LAYERS]
    assert found == [number < many for number in range(len(LAYERS))]
    for layer in LAYERS:  # of one sample parts would be larger than g; of few positions, too
        assert not is_worth(Layer(1, *layer, bytes_each), writes=writes)
        assert not is_worth(Layer(128, 9, *layer[1:], bytes_each), writes=writes)


@pytest.mark.parametrize("bytes_each", [2, 4])
@pytest.mark.parametrize("m", [1, 6, 128])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_tiles_fit_their_layers(layer: tuple[int, ...], m: int, bytes_each: int) -> None:
    positions, channels, _, taps = layer
    tile = choose_weight_tile(Layer(m, *layer, bytes_each), 132)
    assert 1 <= tile.splits <= max(1, m // 4)
    on_chip = STAGES * tile.positions * (tile.channels + tile.taps) * bytes_each
    assert on_chip <= 227 * 1024  # shared memory of a multiprocessor
    assert tile.channels * tile.taps <= 32 * tile.warps * 128  # registers of a thread for the sums
    count = -(-positions // tile.positions) * tile.splits
    parts, columns = tile_of_parts(count, channels * taps, 132)
    assert 1 <= parts <= 64
    assert columns >= 16


def test_a_size_of_which_only_a_symbol_is_known_chooses_no_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a compiler would compile anew for every size of an image."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    monkeypatch.setattr(kernels_of_weights, "processors_of", lambda device: 132)
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    dynamic = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]
    g, x = (
        mode.from_tensor(
            torch.randn(16, channels, 20, 24).to(memory_format=torch.channels_last),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
        )
        for channels in (8, 16)
    )
    plan = kernels_of_weights.plan_for(g, Convolved(x, (1, 1), Window(ONE, NONE, ONE)))
    assert all(type(number) is int for number in plan.tile_of_parts)
    assert type(plan.parts[0]) is torch.SymInt
    assert not environment.guards


def test_not_on_a_cpu() -> None:
    assert not weights_op.is_usable(torch.device("cpu"), torch.float32)


LARGE = [
    Convolution(128, 16, 16, (32, 32), (3, 3), Window(ONE, ONE, ONE)),
    Convolution(100, 64, 64, (8, 8), (3, 3), Window(ONE, ONE, ONE)),
    Convolution(16, 64, 3, (224, 224), (7, 7), Window((2, 2), (3, 3), ONE)),
    Convolution(30, 256, 64, (56, 56), (1, 1), Window(ONE, NONE, ONE)),
    Convolution(30, 512, 128, (28, 28), (1, 1), Window(ONE, NONE, ONE)),
]
EXACT = {torch.float32: 2**-9, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # float32 is TF32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("case", [*CONVOLUTIONS, *LARGE], ids=str)
def test_the_kernels_on_a_gpu(case: Convolution, dtype: torch.dtype) -> None:
    compare(case, "cuda", dtype, EXACT[dtype])


READINGS: list[dict[str, bool]] = [
    {},
    {"stale": True},
    {"share_positions": True, "stale": True},
    {"per_sample": False, "stale": True},
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reading", READINGS, ids=str)
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
def test_compiled_with_the_op_as_eager(
    reading: dict[str, bool], bias: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TF32, in which r and gradients agree to three digits."""
    calls = 0

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return plain_launches(*args, **kwargs)  # type: ignore[arg-type]

    plain_launches = weights_op.launches_of_weight
    monkeypatch.setattr(weights_op, "launches_of_weight", counted)
    monkeypatch.setattr(rms_fused, "prepare_weight", lambda *_: None)  # eager passes by cuDNN
    torch._dynamo.reset()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        found = [trained(bias, compiled, dynamic, **reading) for compiled in (False, True)]
    assert calls
    for eager, by_op in zip(*found, strict=True):
        assert (by_op - eager).norm() <= 4e-3 * eager.norm()


def trained(bias: bool, compiled: bool, dynamic: bool, **reading: bool) -> list[Tensor]:
    """Gradients and r of three steps, the second of two micro-batches."""
    torch.manual_seed(0)
    # Of smooth layers: where a kink or a norm follows, roundings of TF32 grow from step to step.
    layers = (
        *(nn.Conv2d(3, 16, 3, padding=1, bias=bias), nn.Tanh()),
        *(nn.Conv2d(16, 32, 3, stride=2, bias=bias), nn.Tanh()),
        nn.Conv2d(32, 8, 1, bias=bias),
    )
    order = torch.channels_last
    model = nn.Sequential(*layers).to("cuda", memory_format=order)  # type: ignore[call-overload]
    optimizer = SVGD(model, 1e-6, eps=1e-9, **reading)
    run = torch.compile(model, fullgraph=True, dynamic=dynamic) if compiled else model
    found: list[Tensor] = []
    for batch, passes in ((16, 1), (16, 2), (16 + 3 * dynamic, 1)):
        optimizer.zero_grad()
        for _ in range(passes):
            x = torch.randn(batch, 3, 11, 11, device="cuda").to(memory_format=order)
            run(x).pow(3).mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    state = optimizer.operator.state
    return found + [state[key]["r"] for key in sorted(state)]
