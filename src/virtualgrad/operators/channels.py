"""What a layer tells T of its channels, and what each of its operands is to pull back then.

Channels are the axis of sigma that is the first one of a layer's bias, and of its weight but for
transposed convolutions. A kernel that reads g for T adds it up on the way, which is what a bias
needs; and where T multiplies all of g that belongs to a channel by one number, the gradients of
weight and bias can be multiplied instead.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.launches import ALIGNED

MANY = 512  # channels: with fewer of them there is little to gain
Total = Literal["g", "T(g)"]
Pair = tuple[int, ...]
"""Two numbers, downwards and along."""


class Window(NamedTuple):
    """What x a weight meets: of a convolution of images, in one group."""

    stride: Pair
    padding: Pair
    dilation: Pair


class Convolved(NamedTuple):
    """What a convolution of images has made sigma of: x, and the window through which W sees it.

    Attributes:
        x: the input.
        kernel: height and width of the weight.
        window: what x it meets.
    """

    x: Tensor
    kernel: Pair
    window: Window


class Channels(NamedTuple):
    """The channels of a layer, and what it can use of them.

    Attributes:
        axis: of g, along which they lie.
        rows: whether the rows of its gradients can be multiplied, in place of g.
        total: what its bias sums over all other axes, if it has one; T may leave that to it.
        may_pad: whether it can use a T(g) whose rows of channels are longer than they are many.
        convolved: of what a convolution of images has made sigma; T may make the weight's gradient.
    """

    axis: int
    rows: bool = False
    total: Total | None = None
    may_pad: bool = False
    convolved: Convolved | None = None


def pitch_of(channels: int, bytes_each: int) -> int:
    """How long rows of channels are to be where a kernel writes them anew, for a product.

    A multiple of 16 bytes. Rows of 50,257 numbers begin anywhere, and no tensor core takes them as
    they are: on an H200 the product of GPT-2's vocabulary takes five times as long in bfloat16, and
    twice in TF32.
    """
    if channels < MANY:
        return channels
    return -(-channels * bytes_each // ALIGNED) * ALIGNED // bytes_each


class Incoming(NamedTuple):
    """What an operand of an op is to pull back: ``g``, and then times ``rows``.

    ``rows`` has a number for each index of the weight's first axis. A weight is often smaller than
    g, and the true g serves both pull-backs. ``total`` is the sum of g over all axes but that of
    the channels, where it was made on the way. ``weight`` is what a weight gets, where that was
    made, and g only looked at for it. ``padded`` is g with more numbers behind each row of
    channels, that mean nothing: a product with it is faster, and has more rows.
    """

    g: Tensor
    rows: Tensor | None = None
    total: Tensor | None = None
    weight: Tensor | None = None
    padded: Tensor | None = None

    def scaled(self, gradient: Tensor) -> Tensor:
        """The gradient of a weight or a bias, times ``rows``."""
        if self.rows is None:
            return gradient
        rows = self.rows.view(-1, *([1] * (gradient.dim() - 1)))
        return torch.mul(gradient, rows, out=gradient)  # it is nobody else's yet
