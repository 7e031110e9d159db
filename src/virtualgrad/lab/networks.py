"""The paper's three networks, as the authors' released TensorFlow code builds them.

| class      | input       | parameters |
|------------|-------------|------------|
| `MLP`      | 1 x 28 x 28 | 245,482    |
| `VGG`      | 3 x 32 x 32 | 46,126     |
| `ResNet20` | 3 x 32 x 32 | 269,722    |

Images are laid out (N, C, H, W); every network returns 10 logits per image. Three habits of the
released code differ from PyTorch's and are kept, because the published tables came from them:

* batch norm uses the statistics of the batch at test time too, with eps = 1e-3;
* weights start from a normal cut at two standard deviations, sd = sqrt(2 / (c_in + c_out)), where a
  convolution's kernel area does not count;
* padding is TensorFlow's 'SAME': at stride 2 on an even side, bottom and right only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "VGG", "ResNet20"]

CLASSES = 10
NORM_EPS = 1e-3


class MLP(nn.Module):
    """784-256-128-64-32-10 for MNIST; each hidden layer is linear, batch norm, ReLU.

    Args:
        generator: Source of the initial weights; torch's global one if None.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Flatten(),
            *_dense(784, 256),
            *_dense(256, 128),
            *_dense(128, 64),
            *_dense(64, 32),
        )
        self.classifier = nn.Linear(32, CLASSES)
        initialize(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, (N, 1, 28, 28) or already flat (N, 784), to logits (N, 10)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


class VGG(nn.Module):
    """A small VGG for CIFAR-10: five convolutions with bias, normalized once per group.

    Batch norm follows the ReLU here, and closes each of the three groups of convolutions. The very
    first convolution maps the 3 colours to 3 channels.

    Args:
        generator: Source of the initial weights; torch's global one if None.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv3x3(3, 3, bias=True),
            nn.ReLU(),
            _conv3x3(3, 16, bias=True),
            nn.ReLU(),
            _norm2d(16),
            _max_pool(),
            _conv3x3(16, 16, bias=True),
            nn.ReLU(),
            _conv3x3(16, 32, bias=True),
            nn.ReLU(),
            _norm2d(32),
            _max_pool(),
            _conv3x3(32, 128, bias=True),
            nn.ReLU(),
            _norm2d(128),
        )
        self.classifier = nn.Linear(128, CLASSES)
        initialize(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, 10), averaging over positions in between."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR-10 with pre-activation blocks: three stages of 16, 32 and 64 channels.

    The stem is already normalized and rectified, so the first block starts with its convolution.
    Image sides must be multiples of four: the shortcut halves them twice.

    Args:
        generator: Source of the initial weights; torch's global one if None.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3x3(3, 16), _norm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(
            ResidualBlock(16, 16, activated=True),
            ResidualBlock(16, 16),
            ResidualBlock(16, 16),
            ResidualBlock(16, 32),
            ResidualBlock(32, 32),
            ResidualBlock(32, 32),
            ResidualBlock(32, 64),
            ResidualBlock(64, 64),
            ResidualBlock(64, 64),
        )
        self.head = nn.Sequential(_norm2d(64), nn.ReLU())
        self.classifier = nn.Linear(64, CLASSES)
        initialize(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, 10), averaging over positions in between."""
        features = self.head(self.blocks(self.stem(images)))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Shortcut plus twice BN-ReLU-conv; a change of width also halves the image.

    Args:
        c_in: Channels that enter.
        c_out: Channels that leave.
        activated: The input went through BN-ReLU already: leave out the first pair.
    """

    def __init__(self, c_in: int, c_out: int, *, activated: bool = False) -> None:
        super().__init__()
        widens = c_in != c_out
        self.branch = nn.Sequential(
            *([] if activated else [_norm2d(c_in), nn.ReLU()]),
            _conv3x3(c_in, c_out, stride=2 if widens else 1),
            _norm2d(c_out),
            nn.ReLU(),
            _conv3x3(c_out, c_out),
        )
        self.shortcut = WideningShortcut(c_out - c_in) if widens else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, c_in, H, W) to (N, c_out, H, W), or half the sides where the width changes."""
        out: Tensor = self.shortcut(x) + self.branch(x)
        return out


class WideningShortcut(nn.Module):
    """The mean over 2 x 2 windows, with channels of zeros added, half in front and half behind.

    Args:
        extra: How many channels to add; an even number.
    """

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C + extra, H / 2, W / 2)."""
        half = self.extra // 2
        return F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, half, half))


class SamePad(nn.Module):
    """TensorFlow's 'SAME' padding before a 3 x 3 window at stride 2.

    A side of n gives ceil(n / 2) outputs, for which the windows need 1 more row when n is even and
    2 more when n is odd. The odd one out goes behind, so an even side is padded behind only.

    Args:
        value: The padding: 0 before a convolution, -inf before a max pool.
    """

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """Pad the last two dimensions of x."""
        height, width = x.shape[-2:]
        return F.pad(x, (width % 2, 1, height % 2, 1), value=self.value)


def initialize(network: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw the weights of linear layers and convolutions as the released code does, in place.

    Weights come from a normal of sd = sqrt(2 / (c_in + c_out)) cut at 2 sd; biases become 0. Batch
    norm keeps PyTorch's start, scale 1 and offset 0, which is also the paper's.

    Args:
        network: The module whose layers to initialize.
        generator: Source of the weights; torch's global one if None.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            c_out, c_in = layer.weight.shape[:2]
            sd = math.sqrt(2 / (c_in + c_out))
            nn.init.trunc_normal_(layer.weight, std=sd, a=-2 * sd, b=2 * sd, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _dense(c_in: int, c_out: int) -> tuple[nn.Module, ...]:
    norm = nn.BatchNorm1d(c_out, eps=NORM_EPS, track_running_stats=False)
    return nn.Linear(c_in, c_out), norm, nn.ReLU()


def _norm2d(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=NORM_EPS, track_running_stats=False)


def _conv3x3(c_in: int, c_out: int, *, stride: int = 1, bias: bool = False) -> nn.Module:
    if stride == 1:
        return nn.Conv2d(c_in, c_out, 3, padding=1, bias=bias)
    return nn.Sequential(SamePad(), nn.Conv2d(c_in, c_out, 3, stride=stride, bias=bias))


def _max_pool() -> nn.Module:
    return nn.Sequential(SamePad(-math.inf), nn.MaxPool2d(3, stride=2))
