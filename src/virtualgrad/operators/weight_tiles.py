"""Where kernels of our own make the weight gradient of a convolution, and what a program holds.

Symbols are those of :mod:`.kernels_of_weights`: positions p and channels c of sigma, k channels of
x, and the taps j of the weight, which has k of them for each place of its window.
"""

from __future__ import annotations

from typing import NamedTuple

from virtualgrad.operators.tiles import power_of_two_from


class Layer(NamedTuple):
    """The sizes of a convolution's sigma and weight, and the bytes of a number of g."""

    m: int
    positions: int
    channels: int
    k: int
    taps: int
    bytes_each: int


class WeightTile(NamedTuple):
    """What one program of the product holds, and how many programs share the samples.

    Attributes:
        positions, channels, taps: of p, c and j.
        splits: how many programs share the samples.
        warps: of a program.
    """

    positions: int
    channels: int
    taps: int
    splits: int
    warps: int


# Measured on an H200, on the layers of ResNet-20, VGG and ResNet-50 (results/bench/weights.txt).
FEW_PRODUCTS = 2**23  # of a sample: c p j
FEW_PER_NUMBER = {2: 192, 4: 64}  # bytes of a number -> products for each number of g and x
PADDED = 8  # channels of x; for fewer cuDNN copies x
FEW_POSITIONS = 16  # a product takes so many at once
POSITIONS = 32  # of a program


def is_worth(layer: Layer, *, writes: bool) -> bool:
    """Whether the kernels are faster than T and cuDNN's product.

    Args:
        layer: the sizes.
        writes: whether T(g) would be written for cuDNN; where T only sees g, less is gained.
    """
    m, positions, channels, k, taps, bytes_each = layer
    if positions < FEW_POSITIONS or 2 * 4 * taps >= POSITIONS * m * bytes_each:
        return False  # parts of dJ/dW, one for each block of positions, would be half of g or more
    if channels * positions * taps <= FEW_PRODUCTS or (k < PADDED and channels <= 64):
        return True
    few = channels * taps / (channels + k) <= FEW_PER_NUMBER[bytes_each] / (1 if writes else 2)
    # TF32 wants numbers that are summed next to each other. They are not, and x is the dearer one.
    return few and (bytes_each == 2 or (writes and channels >= k))


def choose_weight_tile(layer: Layer, processors: int) -> WeightTile:
    """The tile for a layer, whether it is worth it or not."""
    m, positions, channels, _, taps, bytes_each = layer
    of_p, of_c = POSITIONS, min(64, max(16, power_of_two_from(channels)))
    each_in_turn = False
    if channels * positions * taps <= FEW_PRODUCTS:
        of_j = min(256 if of_c == 16 else 64, max(16, power_of_two_from(taps)))
        of_p = 64 if of_j == 256 and bytes_each == 2 else POSITIONS
        warps = 4 if of_j == 256 or (of_c == 64 and bytes_each == 2) else 2
        programs = processors * 8 // warps
    elif min(channels, taps) <= 64 or bytes_each > 2:
        of_c = 128 if bytes_each > 2 and channels >= 128 else of_c
        of_j, warps, programs = 64, 4, 3 * processors
    else:  # so large that a processor has one program at a time
        of_p, of_c, of_j, warps = 64, 128, min(256, power_of_two_from(taps)), 8
        programs, each_in_turn = processors, True
    each = -(-positions // of_p) * -(-channels // of_c) * -(-taps // of_j)
    splits = round(programs / each)
    if each_in_turn:  # as many as leave the fewest processors without work in the last of two turns
        turns = [(times * processors // each, times) for times in (1, 2)]
        splits = max(turns, key=lambda one: one[0] / one[1])[0]
    return WeightTile(of_p, of_c, of_j, min(max(1, m // 4), max(1, splits)), warps)


def tile_of_parts(count: int, n: int, processors: int) -> tuple[int, int]:
    """Parts and columns that one program adds up at once, of so many parts of n columns."""
    parts = min(64, power_of_two_from(count))
    columns = 2048 // parts
    while columns > 16 and n < 2 * columns * processors:
        columns //= 2
    return parts, columns
