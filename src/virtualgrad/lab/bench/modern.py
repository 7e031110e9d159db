"""ResNet-50, ViT-S/16 and GPT-2 small, as short as they can be written; sizes are arguments.

They are here to be timed, not to be trained to an accuracy: no dropout, no stochastic depth, and
positions are one learned table that is added.

| class      | input         | parameters  |
|------------|---------------|-------------|
| `ResNet50` | 3 x 224 x 224 | 25,557,032  |
| `ViT`      | 3 x 224 x 224 | 22,049,896  |
| `GPT`      | 1,024 tokens  | 124,439,808 |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "ResNet50", "ViT"]

INIT_SD = 0.02  # of GPT-2's matrices and tables


class ResNet50(nn.Module):
    """ResNet-50 with the stride in the 3 x 3 convolution, as torchvision has it.

    Args:
        width: Channels of the stem; the last stage has 32 times as many.
        blocks: Bottlenecks in each of the four stages.
        classes: Number of logits.
    """

    def __init__(
        self, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
    ) -> None:
        super().__init__()
        stem = [*_conv_norm(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.features = nn.Sequential(*stem, *stages)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, classes)."""
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


class Bottleneck(nn.Module):
    """Shortcut plus 1 x 1, 3 x 3 and 1 x 1 convolutions, each normalized.

    Args:
        c_in: Channels that enter.
        width: Channels in the middle; four times as many leave.
        stride: Of the 3 x 3 convolution.
    """

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_conv_norm(c_in, width, 1),
            nn.ReLU(),
            *_conv_norm(width, width, 3, stride=stride),
            nn.ReLU(),
            *_conv_norm(width, 4 * width, 1),
        )
        same = c_in == 4 * width and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_conv_norm(c_in, 4 * width, 1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, c_in, H, W) to (N, 4 width, H / stride, W / stride)."""
        return F.relu(self.shortcut(x) + self.branch(x))


class Block(nn.Module):
    """A pre-norm transformer block: attention, then two linear layers with a GELU between.

    Args:
        features: Width of the residual stream.
        heads: Attention heads.
        causal: Whether a position sees only those before it.
    """

    def __init__(self, features: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features)
        self.out = nn.Linear(features, features)
        self.mlp = nn.Sequential(
            nn.LayerNorm(features),
            nn.Linear(features, 4 * features),
            nn.GELU(),
            nn.Linear(4 * features, features),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, features) to the same shape."""
        n, t, c = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        out: Tensor = x + self.mlp(x)
        return out


class ViT(nn.Module):
    """ViT-S/16 that averages over patches at the end, in place of a class token.

    Args:
        image: Side of the images.
        patch: Side of a patch.
        features: Width.
        depth: Number of blocks.
        heads: Attention heads.
        classes: Number of logits.
    """

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        *,
        features: int = 384,
        depth: int = 12,
        heads: int = 6,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, features, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty((image // patch) ** 2, features))
        nn.init.normal_(self.positions, std=INIT_SD)
        self.blocks = nn.Sequential(*(Block(features, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(features)
        self.classifier = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, H, W) to logits (N, classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.classifier(self.norm(self.blocks(x)).mean(1))
        return logits


class GPT(nn.Module):
    """A decoder of GPT-2 small's shape, whose head is the table of tokens.

    Args:
        vocabulary: Number of tokens.
        length: Longest sequence.
        features: Width.
        depth: Number of blocks.
        heads: Attention heads.
    """

    def __init__(
        self,
        vocabulary: int = 50257,
        length: int = 1024,
        *,
        features: int = 768,
        depth: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, features)
        self.positions = nn.Parameter(torch.empty(length, features))
        self.blocks = nn.Sequential(*(Block(features, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(features)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_SD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, T) to logits (N, T, vocabulary)."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def _conv_norm(c_in: int, c_out: int, kernel: int, *, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(c_out)]
