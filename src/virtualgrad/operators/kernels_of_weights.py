r"""The weight gradient of a convolution under T by kernels of our own; plain torch is their oracle.

With n a sample, p a position of sigma, c a channel, and j = (tap, channel of x) a column of the
weight, laid out channels-last, of which x_npj is the number that it meets there,

    dJ/dW_cj = sum over n, p of f_pc g_npc x_npj,      f = s / sqrt(r + eps)
    q_pc     = sum over n of g_npc^2
    dJ/db_c  = sum over n, p of f_pc g_npc, or of g_npc where the bias has no T

f has no n: a program that walks over samples keeps it, and T(g), as large as sigma, is not made. g
is read once for all three; apart, T reads it and writes T(g), which cuDNN reads again.

The sum over n and p is shared by many programs. Each writes a part of dJ/dW, and a second launch
adds the parts up in a fixed order, so that the same numbers give the same bits.

**Where they are used** (:mod:`.weight_tiles`): where cuDNN is far from what the chip can do, on few
channels and small images, and where the product waits for memory anyway. On many channels cuDNN is
so much faster that T(g) is made for it. Eager passes with the r of before use them by
:class:`WeightGradient`, compiled ones by :mod:`.weights_op`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from virtualgrad.operators.channels import Convolved, Pair
from virtualgrad.operators.kernels import DTYPES, fits, in_order_of, is_usable, processors_of
from virtualgrad.operators.launches import Launch, added_up
from virtualgrad.operators.weight_tiles import Layer, choose_weight_tile, is_worth, tile_of_parts

TENSOR_CORES = (8, 0)  # the first GPUs that have them for all formats
SHARED_MEMORY = 160 * 1024  # bytes that the largest tile takes; GPUs for games have less
MOST_OF_SAMPLE = 2**31  # numbers of x: places within a sample are counted in 32 bits
STAGES = 4  # samples that are asked for before the first has come
TYPICAL = Layer(m=128, positions=1024, channels=64, k=64, taps=576, bytes_each=2)
"""What stands for sizes for which a compiler has symbols: tiles are chosen once for all of them."""
COLUMNS_OF_ROOTS = 512
CUDNN: Any = torch.backends.cudnn
CONVOLUTIONS: Any = CUDNN.conv  # found once: at each look torch finds it in 1 us


class Plan(NamedTuple):
    """How both launches are made, for one shape of g and x.

    Attributes:
        parts: shape of the parts of dJ/dW.
        squares: shape of the sums of g^2 over parts of the samples, channels last.
        weight: shape of dJ/dW, channels last.
        programs: of the product.
        warps: of one of them.
        sizes: arguments of the product behind its tensors.
        meta: and behind its other numbers.
        tile_of_parts: parts and columns that a program adds up.
    """

    parts: tuple[int, int, int]
    squares: tuple[int, int, int, int]
    weight: tuple[int, ...]
    programs: int
    warps: int
    sizes: tuple[int, ...]
    meta: tuple[int, ...]
    tile_of_parts: tuple[int, int]

    @property
    def columns(self) -> int:
        """How many numbers dJ/dW has."""
        return self.parts[1] * self.parts[2]

    @property
    def programs_of_addition(self) -> int:
        """How many programs add up parts."""
        return -(-self.columns // self.tile_of_parts[1])


def plan_for(g: Tensor, convolved: Convolved) -> Plan:
    """The plan for a g and an x, both laid out channels-last, sample behind sample."""
    x, kernel, window = convolved
    height, width = g.shape[2:]
    layer = layer_of(g, x.shape[1], kernel)
    m, positions, channels, k, taps, _ = layer
    processors = processors_of(g.device)
    sizes = zip(layer, TYPICAL, strict=True)
    known = Layer(*(size if type(size) is int else typical for size, typical in sizes))
    tile = choose_weight_tile(known, processors)
    count = -(-positions // tile.positions) * tile.splits
    known_count = -(-known.positions // tile.positions) * tile.splits
    of_g = (m, -(-m // tile.splits), positions, channels, taps, width, positions * channels)
    of_x = (x.shape[2] * x.shape[3] * k, x.shape[3] * k, k, x.shape[2], x.shape[3])
    blocks = -(-channels // tile.channels) * -(-taps // tile.taps)
    return Plan(
        parts=(count, channels, taps),
        squares=(tile.splits, height, width, channels),
        weight=(channels, *kernel, k),
        programs=count * blocks,
        warps=tile.warps,
        sizes=(*of_g, *of_x),
        meta=(k, kernel[1], *window.stride, *window.padding, *window.dilation, *tile[:3], STAGES),
        tile_of_parts=tile_of_parts(known_count, channels * taps, processors),
    )


class WeightMade(NamedTuple):
    """dJ/dW, the new norm of each column of g, and dJ/db, where it was asked for."""

    weight: Tensor
    norm: Tensor
    total: Tensor | None


class WeightGradient:
    """The weight gradient at one site for one shape and strides of g and x, in an eager pass.

    Args:
        g: dJ/dsigma.
        convolved: what sigma was made of.
        total: what the bias sums, if it is to be summed: g, or T(g).
    """

    def __init__(self, g: Tensor, convolved: Convolved, total: str | None) -> None:
        from virtualgrad.operators import weight_kernel  # noqa: PLC0415 - imports Triton

        plan = plan_for(g, convolved)
        self._parts, self._squares, self._weight = plan.parts, plan.squares, plan.weight
        self._sizes, self._meta = plan.sizes, (total == "T(g)", *plan.meta)
        self._is_summed = total is not None
        self._launch = Launch(weight_kernel.weight_parts, (plan.programs, 1, 1), g, plan.warps)
        columns = g.numel() // g.shape[0]
        blocks = plan.programs_of_addition
        grid = (blocks + -(-columns // COLUMNS_OF_ROOTS), 1, 1)
        self._launch_addition = Launch(weight_kernel.add_parts, grid, g, 4)
        count = plan.parts[0]
        sizes = (count, plan.columns, blocks, plan.squares[0], columns)
        self._sizes_of_addition = (*sizes, *plan.tile_of_parts, COLUMNS_OF_ROOTS)

    def __call__(
        self, g: Tensor, x: Tensor, r: Tensor, earlier: Tensor | None, factor: tuple[float, float]
    ) -> WeightMade:
        """Return the gradients, and the new root of the sum of g^2 of each column.

        Args:
            g: as it was when this was prepared.
            x: as well.
            r: the running mean of before, laid out as one sample of g.
            earlier: the root for the passes since the last commit, None if this is the first.
            factor: s and eps.
        """
        # r is in float32, as are sums. Sizes one by one: torch takes longer to read a tuple.
        parts, squares = r.new_empty(*self._parts), r.new_empty(*self._squares)
        weight = g.new_empty(*self._weight)
        sums = r.new_empty(*self._parts[:2]) if self._is_summed else None
        norm = torch.empty_like(r)
        # An int would be another signature, and compiled anew for some values.
        numbers = (float(factor[0]), float(factor[1]))
        others = (*self._sizes, *numbers, *self._meta)
        self._launch((g, x, r, None, parts, squares, sums), others, None, (g, x, r))
        earlier = in_order_of(norm, earlier)
        kind = None if earlier is None else earlier.dtype
        tensors = (parts, weight, squares, earlier, norm)
        self._launch_addition(tensors, self._sizes_of_addition, kind, (earlier,))
        total = None if sums is None else added_up(sums, 0)
        return WeightMade(weight.permute(0, 3, 1, 2), norm, total)


def prepare_weight(
    g: Tensor, r: Tensor, averaged: tuple[int, ...], convolved: Convolved, total: str | None
) -> WeightGradient | None:
    """The kernels for a g and an x of these shapes and strides; None where there are none.

    Args:
        g: dJ/dsigma, (samples, channels, height, width).
        r: the running mean beside it.
        averaged: the axes over which g^2 is averaged.
        convolved: what sigma was made of.
        total: what the bias sums, if it is to be summed.
    """
    x, kernel, _ = convolved
    if averaged != (0,) or type(x) is not Tensor or x.dtype != g.dtype or not fits(g, r, 0):
        return None
    order = torch.channels_last
    if not (g.is_contiguous(memory_format=order) and x.is_contiguous(memory_format=order)):
        return None
    if x.numel() >= MOST_OF_SAMPLE * x.shape[0]:
        return None
    layer = layer_of(g, x.shape[1], kernel)
    if not is_worth(layer, writes=True) or not may_multiply(g.device, g.dtype):
        return None
    return WeightGradient(g, convolved, total)


def layer_of(sigma: Tensor, k: int, kernel: Pair) -> Layer:
    """The sizes of a convolution by its sigma (or g), the channels of x, and its window."""
    m, channels, height, width = sigma.shape
    taps = k * kernel[0] * kernel[1]
    return Layer(m, height * width, channels, k, taps, sigma.element_size())


def may_multiply(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels may make products of a dtype on a device.

    One in float32 is one in TF32 here, and made where torch may use that for convolutions, too.
    """
    if dtype not in DTYPES or (dtype == torch.float32 and not may_use_tf32()):
        return False
    return _has_tensor_cores(device) and is_usable(device)


def may_use_tf32() -> bool:
    """Whether torch may use TF32 for convolutions in float32."""
    return bool(CUDNN.enabled and CONVOLUTIONS.fp32_precision == "tf32")


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Whether it has those that Triton multiplies by, and enough memory beside them."""
    if device.type == "cpu":  # the interpreter
        return True
    if torch.version.hip is not None:
        return False
    properties = torch.cuda.get_device_properties(device)
    large = getattr(properties, "shared_memory_per_block_optin", 0) >= SHARED_MEMORY
    return large and torch.cuda.get_device_capability(device) >= TENSOR_CORES


def plain(
    g: Tensor, convolved: Convolved, factor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The oracle: dJ/dW, q, and the sums of g and T(g), by the formulas above, in g's precision."""
    x, kernel, window = convolved
    product = g if factor is None else g * factor
    like = g.new_empty(g.shape[1], x.shape[1], *kernel)
    weight: Tensor = torch.ops.aten.convolution_backward(
        product, x, like, None, *map(list, window), False, [0, 0], 1, [False, True, False]
    )[1]
    others = (0, 2, 3)
    return weight, g.square().sum(0), g.sum(others), product.sum(others)
