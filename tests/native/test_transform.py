"""T of a plain pass by C++ is Python's, to the last bit, and gives way to it where it must."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgrad import SVGD, native, operators
from virtualgrad.errors import NonFiniteError, ShapeChangedError
from virtualgrad.virtual.tracking import Transform

pytestmark = pytest.mark.usefixtures("in_cpp")

LR = 1e-5
LEARNED_AFTER = 3  # steps: r is begun, a kind of g is seen, and seen again
Build = Callable[[], nn.Module]
Change = Callable[[SVGD, int], None]


class Mean(nn.Module):
    """Over positions: the g that it hands back lies nowhere as channels-last images do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def on_images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))


MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)), (4, 6)),
    "linear, no bias": (lambda: nn.Linear(6, 3, bias=False), (4, 6)),
    "linear, many samples": (lambda: nn.Linear(6, 16), (64, 6)),
    "linear, many channels": (lambda: nn.Linear(6, 300), (33, 6)),
    "linear, many rows": (lambda: nn.Linear(6, 43), (300, 6)),
    "linear, few channels": (lambda: nn.Linear(6, 7), (70, 6)),
    "tokens": (lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), (4, 160, 8)),
    "a vocabulary": (lambda: nn.Linear(16, 1001), (4, 8, 16)),
    "conv1d": (lambda: nn.Conv1d(4, 8, 3), (4, 4, 12)),
    "conv2d": (lambda: on_images(nn.Conv2d(16, 16, 3, padding=1)), (16, 16, 16, 16)),
    "conv2d, no bias": (
        lambda: on_images(nn.Conv2d(16, 16, 3, padding=1, bias=False)),
        (16, 16, 16, 16),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        (8, 6),
    ),
    "batch norm, images": (
        lambda: on_images(nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16)),
        (8, 8, 10, 10),
    ),
    "batch norm, first": (lambda: on_images(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)), (8, 8, 6, 6)),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 3)),
        (4, 5, 6),
    ),
    "layer norm, two axes": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm((5, 6))),
        (4, 5, 6),
    ),
    "a norm before a mean": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Mean(), nn.Linear(8, 2)),
        (4, 3, 9, 9),
    ),
    "conv2d, wide": (lambda: on_images(nn.Conv2d(8, 24, 3, stride=2)), (4, 8, 17, 17)),
}
READINGS: dict[str, Callable[[nn.Module], SVGD]] = {
    "released": lambda model: SVGD.released(model, LR, 0.5),
    "Algorithm 1": lambda model: SVGD(model, LR, scale=2.0),
    "Algorithm 1, s = 1": lambda model: SVGD(model, LR),
    "stale, every op": lambda model: SVGD(model, LR, stale=True),
    "shared": lambda model: SVGD.released(model, LR, share_positions=True),
    "shared, r updated first": lambda model: SVGD(model, LR, share_positions=True),
}


def unchanged(optimizer: SVGD, step: int) -> None:
    """Change nothing."""


def train(
    model: str,
    reading: str = "released",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    change: Change = unchanged,
    steps: int = 7,
) -> list[Tensor]:
    """Parameters, gradients and r behind some steps."""
    torch.manual_seed(0)
    build, shape = MODELS[model]
    network = build()
    network(torch.randn(shape))
    network.to(device, dtype).to(memory_format=torch.channels_last)
    optimizer = READINGS[reading](network)
    for step in range(steps):
        change(optimizer, step)
        optimizer.zero_grad()
        x = torch.randn(shape).to(device, dtype)
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = network(x).square().mean()
        loss.backward()
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    r = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return [each.detach().clone() for each in (*network.parameters(), *gradients, *r)]


@contextmanager
def asked_in_python() -> Iterator[list[str]]:
    """The sites for which T is asked in Python."""
    asked: list[str] = []

    def noting(method: Any, how: str) -> Any:
        def note(self: Transform, *args: Any, **options: Any) -> Any:
            asked.append(f"{self.site.key}{how}")
            return method(self, *args, **options)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transform, "for_layer", noting(Transform.for_layer, ""))
        norm_gradients = noting(Transform.norm_gradients, " by kernels")
        patch.setattr(Transform, "norm_gradients", norm_gradients)
        yield asked


def assert_as_in_python(*args: Any, **options: Any) -> list[str]:
    """Train in Python and in C++ to the same bits; the sites for which C++ has asked Python."""
    native.use(False)
    try:
        theirs = train(*args, **options)
    finally:
        native.use(True)
    with asked_in_python() as asked:
        ours = train(*args, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return asked


@pytest.fixture(autouse=True)
def one_kernel_for_each_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU; otherwise cuDNN may sum in another order from one call to the next."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def assert_learned(asked: list[str], most: int = LEARNED_AFTER) -> None:
    assert asked
    assert max(asked.count(site) for site in asked) == most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, reading: str, device: str) -> None:
    assert_learned(assert_as_in_python(model, reading, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reading", ["released", "Algorithm 1"])
def test_double_precision(reading: str, device: str) -> None:
    assert_learned(assert_as_in_python("linear", reading, device=device, dtype=torch.float64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", ["linear", "tokens", "conv2d, no bias"])
def test_autocast(model: str, device: str) -> None:
    if device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bfloat16 on this CPU")
    assert_as_in_python(model, device=device, autocast=True)


def other_numbers(optimizer: SVGD, step: int) -> None:
    """New s, eps and rho; a whole number now and then."""
    for group in optimizer.param_groups:
        group["scale"], group["eps"], group["rho"] = step + 1, 10.0 ** -(step + 3), 0.1 * step


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reading", ["released", "Algorithm 1", "shared"])
@pytest.mark.parametrize("model", ["linear", "tokens", "conv2d, no bias"])
def test_numbers_that_change_are_seen(model: str, reading: str, device: str) -> None:
    assert_as_in_python(model, reading, device=device, change=other_numbers)


@pytest.mark.parametrize("reading", ["released", "Algorithm 1"])
def test_a_tensor_for_a_number_is_left_to_python(reading: str) -> None:
    def in_a_tensor(optimizer: SVGD, step: int) -> None:
        optimizer.param_groups[0]["eps"] = torch.tensor(1e-4)

    asked = assert_as_in_python("linear", reading, change=in_a_tensor)
    assert_learned(asked, most=7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_is_loaded_is_used(device: str) -> None:
    saved: list[Any] = []

    def back_to_the_second(optimizer: SVGD, step: int) -> None:
        if step == 1:
            saved[:] = [copy.deepcopy(optimizer.state_dict())]
        if step == 5:
            optimizer.load_state_dict(saved[0])

    assert_as_in_python("linear", "released", device=device, change=back_to_the_second)


def network() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["linear"][0]()


def learned(model: nn.Module, optimizer: SVGD, rows: int = 4) -> list[Any]:
    """Train until C++ has T at every site; what is kept at the sites."""
    for _ in range(LEARNED_AFTER):
        optimizer.zero_grad()
        model(torch.randn(rows, 6)).square().mean().backward()
        optimizer.step()
    sites = list(optimizer.operator.sites.kept.values())
    assert all(site.plain is not None for site in sites)
    return sites


def test_another_batch_size_counts_its_own_samples() -> None:
    results = []
    for in_cpp in (False, True):
        native.use(in_cpp)
        try:
            model = network()
            optimizer = SVGD(model, LR)
            for rows in (4, 4, 4, 4, 2, 4, 4, 4, 4, 8, 8, 8, 8):
                optimizer.zero_grad()
                model(torch.randn(rows, 6)).square().mean().backward()
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
        finally:
            native.use(True)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_inputs_that_are_ever_new_are_left_to_python() -> None:
    model = nn.Linear(6, 3)
    optimizer = SVGD(model, LR, share_positions=True)
    for length in range(2, 9):
        optimizer.zero_grad()
        model(torch.randn(2, length, 6)).square().mean().backward()
        optimizer.step()
    (site,) = optimizer.operator.sites.kept.values()
    assert site.plain is None and site.plain_tried is None


def test_a_changed_shape_is_refused_as_ever() -> None:
    model = nn.Conv1d(6, 3, 3)
    optimizer = SVGD(model, LR)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 6, 9)).square().mean().backward()
        optimizer.step()
    with pytest.raises(ShapeChangedError, match="share_positions"):
        model(torch.randn(2, 6, 8)).square().mean().backward()


def test_nan_is_found_and_leaves_no_trace() -> None:
    model = network()
    optimizer = SVGD.released(model, LR)
    sites = learned(model, optimizer)
    before = [site.r.clone() for site in sites]
    optimizer.zero_grad()
    with asked_in_python() as asked:
        (model(torch.randn(4, 6)).square().mean() * float("nan")).backward()
    assert not asked
    with pytest.raises(NonFiniteError, match=r"2:linear\(weight\)"):
        optimizer.step()
    for site, r in zip(sites, before, strict=True):
        assert torch.equal(site.r, r) and site.norm is None


class NotingOps(TorchDispatchMode):
    """Writes down the ops that are run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_ops_of_python() -> None:
    model = network()
    optimizer = SVGD.released(model, LR)
    learned(model, optimizer)
    loss = model(torch.randn(4, 6)).square().mean()
    with NotingOps() as noting, asked_in_python() as asked:
        loss.backward()
    assert len(asked) == 2 and any("sqrt" in name for name in noting.seen)


class Halved(operators.RMS):
    """An operator with a T of its own."""

    def __call__(self, g: Tensor, site: Any, /) -> Tensor:
        return super().__call__(g, site) / 2


def test_a_subclass_keeps_its_t() -> None:
    from virtualgrad import VirtualGradientDescent

    model = network()
    twin = network()
    halved = VirtualGradientDescent(model, LR, Halved())
    whole = VirtualGradientDescent(twin, LR / 2, operators.RMS())
    for _ in range(5):
        x = torch.randn(4, 6)
        for each, optimizer in ((model, halved), (twin, whole)):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert all(site.plain is None for site in halved.operator.sites.kept.values())
    assert any(site.plain is not None for site in whole.operator.sites.kept.values())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda site: pickle.loads(pickle.dumps(site))])
def test_copies_begin_anew(copied: Callable[[Any], Any]) -> None:
    model = network()
    site = learned(model, SVGD.released(model, LR))[0]
    assert copied(site.plain) is None


def test_a_pass_that_fails_is_over() -> None:
    model = nn.Linear(6, 3)
    optimizer = SVGD.released(model, LR)
    learned(model, optimizer)
    settings = optimizer.operator.settings

    def failing(site: Any) -> Any:
        raise RuntimeError("out of memory")

    optimizer.operator.settings = failing
    loss = model(torch.randn(4, 6)).square().mean()
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward()
    optimizer.operator.settings = settings
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()  # loss is alive still
    optimizer.step()
    assert len(optimizer.operator.sites.kept) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_that_changes_is_seen(device: str) -> None:
    def wider(optimizer: SVGD, step: int) -> None:
        convolution: Any = optimizer.model[0]  # type: ignore[index]
        convolution.padding = convolution.dilation = (2, 2) if step in (5, 6, 11) else (1, 1)

    assert_as_in_python("conv2d, no bias", device=device, change=wider, steps=13)


def test_a_switch_that_is_changed_is_seen() -> None:
    def fresh(optimizer: SVGD, step: int) -> None:
        optimizer.operator.stale = step < 5

    assert_as_in_python("linear", change=fresh, steps=9)
