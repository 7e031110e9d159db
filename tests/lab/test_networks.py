"""The networks are the paper's: counted, and compared with slow readings of TensorFlow's rules."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from virtualgrad.lab.networks import (
    MLP,
    VGG,
    ResidualBlock,
    ResNet20,
    SamePad,
    WideningShortcut,
    initialize,
)

NETWORKS = [
    pytest.param(MLP, (1, 28, 28), 245_482, id="MLP"),
    pytest.param(VGG, (3, 32, 32), 46_126, id="VGG"),
    pytest.param(ResNet20, (3, 32, 32), 269_722, id="ResNet20"),
]
SIDES = [(4, 4), (5, 5), (6, 3), (3, 6), (2, 8)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted_layers(network: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    return [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def sliding_same(x: Tensor, reduce: Callable[[Tensor, slice, slice], Tensor]) -> Tensor:
    """TensorFlow's SAME rule for a 3 x 3 window at stride 2, one output position at a time.

    `reduce` gets the part of the window inside the image, and which rows and columns of the
    window that part is.
    """

    def windows(side: int) -> list[tuple[slice, slice]]:
        out = math.ceil(side / 2)
        before = max((out - 1) * 2 + 3 - side, 0) // 2
        starts = [2 * i - before for i in range(out)]
        inside = [(max(s, 0), min(s + 3, side)) for s in starts]
        return [
            (slice(a, b), slice(a - s, b - s)) for s, (a, b) in zip(starts, inside, strict=True)
        ]

    height, width = x.shape[-2:]
    rows = [
        torch.stack([reduce(x[..., r, c], kr, kc) for c, kc in windows(width)], dim=-1)
        for r, kr in windows(height)
    ]
    return torch.stack(rows, dim=-2)


@pytest.mark.parametrize(("network", "image", "parameters"), NETWORKS)
def test_counts_and_shapes_are_the_papers(network, image, parameters):
    model = network(seeded())
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.randn(4, *image, generator=seeded())).shape == (4, 10)


def test_mlp_takes_flat_images():
    model, images = MLP(seeded()), torch.randn(4, 1, 28, 28, generator=seeded())
    assert torch.equal(model(images), model(images.flatten(1)))


def test_resnet_has_188426_outputs_that_meet_a_weight():
    model, sizes = ResNet20(seeded()), []
    for layer in weighted_layers(model):
        layer.register_forward_hook(lambda _m, _x, out: sizes.append(out[0].numel()))
    model(torch.randn(2, 3, 32, 32, generator=seeded()))
    assert len(sizes) == 20
    assert sum(sizes) == 188_426


@pytest.mark.parametrize("sides", SIDES)
def test_stride_two_convolution_pads_as_tensorflow(sides):
    x = torch.randn(2, 3, *sides, generator=seeded(), dtype=torch.float64)
    conv = nn.Conv2d(3, 4, 3, stride=2, bias=False, dtype=torch.float64)
    oracle = sliding_same(
        x, lambda part, r, c: torch.einsum("nihw,oihw->no", part, conv.weight[..., r, c])
    )
    torch.testing.assert_close(conv(SamePad()(x)), oracle, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sides", SIDES)
def test_max_pool_pads_as_tensorflow(sides):
    # All negative: zeros in the padding would win.
    x = -1 - torch.rand(2, 3, *sides, generator=seeded())
    oracle = sliding_same(x, lambda part, _r, _c: part.amax((-2, -1)))
    assert torch.equal(nn.MaxPool2d(3, stride=2)(SamePad(-math.inf)(x)), oracle)


def test_every_stride_two_window_in_the_networks_is_same_padded():
    for network, windows, padding in [(VGG, nn.MaxPool2d, -math.inf), (ResNet20, nn.Conv2d, 0.0)]:
        pairs = [m for m in network().modules() if isinstance(m, nn.Sequential) and len(m) == 2]
        padded = [window for pad, window in pairs if getattr(pad, "value", None) == padding]
        strided = [m for m in network().modules() if getattr(m, "stride", 1) in (2, (2, 2))]
        assert len(padded) == len(strided) == 2
        for window in padded:
            assert isinstance(window, windows)
            assert window.padding in (0, (0, 0))


def test_widening_shortcut_averages_and_centres():
    x = torch.arange(32.0).reshape(1, 2, 4, 4)
    out = WideningShortcut(4)(x)
    assert out.shape == (1, 6, 2, 2)
    assert not out[:, :2].any()
    assert not out[:, 4:].any()
    assert torch.equal(out[0, 2], torch.tensor([[2.5, 4.5], [10.5, 12.5]]))
    assert torch.equal(out[0, 3], torch.tensor([[18.5, 20.5], [26.5, 28.5]]))


@pytest.mark.parametrize("c_out", [4, 8])
@pytest.mark.parametrize("activated", [False, True])
def test_block_is_shortcut_plus_preactivated_branch(c_out, activated):
    block = ResidualBlock(4, c_out, activated=activated).double()
    initialize(block, seeded())
    first, second = [layer.weight for layer in weighted_layers(block)]
    x = torch.randn(3, 4, 6, 6, generator=seeded(), dtype=torch.float64)

    def rectified_norm(y: Tensor) -> Tensor:
        mean = y.mean((0, 2, 3), keepdim=True)
        variance = (y - mean).square().mean((0, 2, 3), keepdim=True)
        return ((y - mean) / (variance + 1e-3).sqrt()).clamp(min=0)

    y = x if activated else rectified_norm(x)
    if c_out == 4:
        shortcut, y = x, torch.conv2d(y, first, padding=1)
    else:
        shortcut = WideningShortcut(4)(x)
        y = sliding_same(
            y, lambda part, r, c: torch.einsum("nihw,oihw->no", part, first[..., r, c])
        )
    oracle = shortcut + torch.conv2d(rectified_norm(y), second, padding=1)
    torch.testing.assert_close(block(x), oracle, rtol=1e-12, atol=1e-12)


def test_only_the_first_resnet_block_skips_its_first_norm():
    norms = [
        sum(isinstance(m, nn.BatchNorm2d) for m in block.modules()) for block in ResNet20().blocks
    ]
    assert norms == [1] + [2] * 8


@pytest.mark.parametrize(("network", "image", "parameters"), NETWORKS)
def test_weights_start_from_a_normal_cut_at_two_deviations(network, image, parameters):
    # A standard normal cut at +-2 has standard deviation 0.8796.
    scaled = []
    for layer in weighted_layers(network(seeded())):
        c_out, c_in = layer.weight.shape[:2]
        scaled.append(layer.weight.detach().flatten() / math.sqrt(2 / (c_in + c_out)))
        assert scaled[-1].abs().max() <= 2 * (1 + 1e-6)
        assert scaled[-1].std() == pytest.approx(0.8796, abs=3 / math.sqrt(len(scaled[-1])))
        assert layer.bias is None or not layer.bias.any()
    pooled = torch.cat(scaled)
    assert pooled.abs().max() > 1.99
    assert pooled.std() == pytest.approx(0.8796, abs=3 / math.sqrt(len(pooled)))


@pytest.mark.parametrize(("network", "image", "parameters"), NETWORKS)
def test_batch_norm_starts_plain_and_uses_the_batch_in_eval_too(network, image, parameters):
    model = network(seeded())
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert norms
    assert all(m.eps == 1e-3 and (m.weight == 1).all() and not m.bias.any() for m in norms)
    assert not list(model.buffers())
    images = torch.randn(4, *image, generator=seeded())
    assert torch.equal(model.train()(images), model.eval()(images))
    assert not torch.allclose(model(images)[:2], model(images[:2]))


@pytest.mark.parametrize(("network", "image", "parameters"), NETWORKS)
def test_generator_alone_decides_the_weights(network, image, parameters):
    def weights(seed: int) -> Tensor:
        model = network(seeded(seed))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(7), weights(7))
    assert not torch.equal(weights(7), weights(8))
