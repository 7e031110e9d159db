"""From raw pixels to what the networks see, as the authors' released code does it.

Everything runs on the device that holds the images, for the whole batch at once, and never asks the
host for a value: it can be captured in a CUDA graph. Chance enters only through `draw_crops`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Crops", "augment", "crop", "draw_crops", "mnist_pixels", "standardize"]

PAD = 2
OFFSETS = 4  # the released code draws 0..3; offset 4 would fit as well


class Crops(NamedTuple):
    """What chance decides about each image of a batch; every tensor has shape (N,).

    Attributes:
        row_offsets: The first row of the padded image, 0..3.
        column_offsets: The first column of the padded image, 0..3.
        flips: Whether to mirror left and right.
    """

    row_offsets: Tensor
    column_offsets: Tensor
    flips: Tensor


def mnist_pixels(images: Tensor) -> Tensor:
    """Map uint8 images (N, 1, 28, 28) to float32 pixels in [0, 1], flat: (N, 784)."""
    return images.flatten(1).float() / 255


def standardize(images: Tensor) -> Tensor:
    """Subtract from each image its mean and divide by its sd, over all channels and pixels.

    The sd is taken as at least 1 / sqrt(C H W), so that an image of one colour becomes zeros.

    Args:
        images: (N, C, H, W) raw pixels, uint8 or floating point.

    Returns:
        The same shape, float32 for uint8 and else the same type.
    """
    if not images.is_floating_point():
        images = images.float()
    var, mean = torch.var_mean(images, (1, 2, 3), correction=0, keepdim=True)
    least = 1 / math.sqrt(images[0].numel())
    return (images - mean) / var.sqrt().clamp(min=least)


def draw_crops(
    count: int,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Crops:
    """Draw offsets in 0..3 and flips with probability 1/2 for `count` images.

    Args:
        count: How many images.
        generator: Source of chance, on the same device; torch's global one if None.
        device: Where to draw.
    """

    def draw(below: int) -> Tensor:
        return torch.randint(below, (count,), generator=generator, device=device)

    return Crops(draw(OFFSETS), draw(OFFSETS), draw(2).bool())


def crop(images: Tensor, row_offsets: Tensor, column_offsets: Tensor, flips: Tensor) -> Tensor:
    """Pad with 2 pixels of zeros on each side and cut each image's own window of the old size.

    With W the width and w the column offset, a window reads columns w .. w + W - 1; a flipped one
    reads w + W down to w + 1, one column further right, as the released code does.

    Args:
        images: (N, C, H, W), any type.
        row_offsets: The window's first row for each image, 0..3.
        column_offsets: The window's first column for each image, 0..3.
        flips: Which images to flip, as booleans.

    Returns:
        The same shape and type, laid out channels-last.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (PAD, PAD, PAD, PAD))
    along_rows = torch.arange(height, device=images.device)
    along_columns = torch.arange(width, device=images.device)
    rows = row_offsets[:, None] + along_rows
    columns = column_offsets[:, None] + torch.where(
        flips[:, None], width - along_columns, along_columns
    )
    image = torch.arange(count, device=images.device)[:, None, None]
    windows = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return windows.permute(0, 3, 1, 2)


def augment(images: Tensor, row_offsets: Tensor, column_offsets: Tensor, flips: Tensor) -> Tensor:
    """Cut and flip as `crop` does, then standardize: the training images of CIFAR-10.

    Draw the choices with `draw_crops`: `augment(images, *draw_crops(len(images), generator))`.

    Args:
        images: (N, C, H, W) raw pixels, uint8 or floating point.
        row_offsets: The window's first row for each image, 0..3.
        column_offsets: The window's first column for each image, 0..3.
        flips: Which images to flip, as booleans.

    Returns:
        The same shape, float32 for uint8 and else the same type.
    """
    return standardize(crop(images, row_offsets, column_offsets, flips))
