"""What the networks see, against the released code's rules taken one image at a time."""

import math

import pytest
import torch

from virtualgrad.lab.data import augment, crop, draw_crops, mnist_pixels, standardize


def raw_images(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, 32, 32), generator=generator).to(dtype)


def slow_crop(image, row, column, flip):
    padded = torch.zeros(3, 36, 36, dtype=image.dtype)
    padded[:, 2:34, 2:34] = image
    out = torch.empty_like(image)
    for y in range(32):
        for x in range(32):
            out[:, y, x] = padded[:, row + y, column + 32 - x if flip else column + x]
    return out


def slow_standardize(image):
    values = image.double().flatten().tolist()
    mean = sum(values) / 3072
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / 3072)
    return (image.double() - mean) / max(sd, 1 / math.sqrt(3072))


def all_choices():
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4), torch.arange(2))
    return grid[:, 0], grid[:, 1], grid[:, 2].bool()


def test_every_crop_and_flip_is_the_slow_ones():
    images, choices = raw_images(32), all_choices()
    cropped, augmented = crop(images, *choices), augment(images, *choices)
    assert cropped.dtype == torch.uint8 and augmented.dtype == torch.float32
    for i, choice in enumerate(zip(*(tensor.tolist() for tensor in choices), strict=True)):
        expected = slow_crop(images[i], *choice)
        assert torch.equal(cropped[i], expected)
        torch.testing.assert_close(augmented[i].double(), slow_standardize(expected))


def test_a_flipped_window_lies_one_column_further_right():
    images, zero = raw_images(1), torch.zeros(1, dtype=torch.int64)
    plain = crop(images, zero, zero + 1, torch.tensor([False]))
    flipped = crop(images, zero, zero, torch.tensor([True]))
    assert torch.equal(flipped, plain.flip(3))


def test_windows_are_channels_last():
    cropped = crop(raw_images(32), *all_choices())
    assert cropped.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_standardize_uses_each_images_own_mean_and_sd(dtype):
    images = raw_images(4, dtype)
    result = standardize(images)
    assert result.dtype == (torch.float32 if dtype == torch.uint8 else dtype)
    for image, standardized in zip(images, result, strict=True):
        torch.testing.assert_close(
            standardized.double(), slow_standardize(image), rtol=1e-5, atol=1e-5
        )


def test_an_image_of_one_colour_becomes_zeros():
    assert torch.equal(standardize(torch.full((1, 3, 32, 32), 7)), torch.zeros(1, 3, 32, 32))


def test_the_sd_is_at_least_one_over_the_root_of_the_size():
    image = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    image[0, 0, 0, 0] = 1e-3
    torch.testing.assert_close(standardize(image)[0], slow_standardize(image[0]))


def test_mnist_pixels_are_flat_and_in_zero_to_one():
    images = torch.arange(256, dtype=torch.uint8).repeat(49)[: 16 * 784].reshape(16, 1, 28, 28)
    pixels = mnist_pixels(images)
    assert pixels.shape == (16, 784) and pixels.dtype == torch.float32
    assert pixels.min() == 0 and pixels.max() == 1
    assert torch.equal((pixels * 255).round().to(torch.uint8), images.flatten(1))


def test_drawn_choices_are_fair_and_follow_the_generator():
    def draw():
        return draw_crops(8_000, torch.Generator().manual_seed(0))

    for again, choice in zip(draw(), draw(), strict=True):
        assert torch.equal(again, choice)
    rows, columns, flips = draw()
    for offsets in (rows, columns):
        assert offsets.unique().tolist() == [0, 1, 2, 3]
        assert (offsets.bincount() / 8_000 - 0.25).abs().max() < 0.02
    assert flips.dtype == torch.bool and abs(flips.float().mean() - 0.5) < 0.02
    assert not torch.equal(rows, columns)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_draws_and_augments_without_the_host():
    images = raw_images(128).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    augment(images, *draw_crops(128, generator, "cuda"))
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        choices = draw_crops(128, generator, images.device)
        augmented = augment(images, *choices)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(augmented.clone())
        expected = augment(images.cpu(), *(choice.cpu() for choice in choices))
        torch.testing.assert_close(augmented.cpu(), expected)
    assert not torch.equal(*seen)
