"""Every sample once per epoch, any step reachable, images as the released code prepares them."""

import pytest
import torch
from tiny_lab import tiny_colours, tiny_data

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.batches import Batches, evaluation_set
from virtualgrad.lab.data import ImageData, augment, standardize

CPU = torch.device("cpu")


def numbered(count, name="numbered", shape=(1, 1, 1)):
    """Images whose label is their number."""
    images = torch.zeros(count, *shape, dtype=torch.uint8)
    return ImageData(name, "", images, torch.arange(count), images, torch.arange(count))


def labels_of(batches, steps):
    return torch.cat([batches.next()[1] for _ in range(steps)]).tolist()


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_sample_once_per_epoch(epoch):
    batches = Batches(numbered(40), 8, 0, CPU, False)
    assert batches.per_epoch == 5
    batches.seek(epoch * 5)
    seen = labels_of(batches, 5)
    assert sorted(seen) == list(range(40)) and seen != sorted(seen)


def test_a_short_last_batch_is_dropped():
    batches = Batches(numbered(43), 8, 0, CPU, False)
    assert batches.per_epoch == 5
    batches.seek(0)
    seen = labels_of(batches, 5)
    assert len(set(seen)) == 40


@pytest.mark.parametrize("data", [numbered(43), tiny_colours(train=43)], ids=["grey", "colour"])
@pytest.mark.parametrize("step", [0, 3, 5, 13])
def test_seeking_a_step_equals_running_up_to_it(data, step):
    ran, sought = (Batches(data, 8, 1, CPU, False) for _ in range(2))
    for done in range(step + 1):
        if done % ran.per_epoch == 0:
            ran.seek(done)
        images, labels = ran.next()
    sought.seek(step)
    images_too, labels_too = sought.next()
    assert torch.equal(images, images_too) and torch.equal(labels, labels_too)


def test_seeds_and_epochs_differ():
    orders = []
    for seed in (0, 1):
        batches = Batches(numbered(40), 8, seed, CPU, False)
        for step in (0, 5):
            batches.seek(step)
            orders.append(tuple(labels_of(batches, 5)))
    assert len(set(orders)) == 4


@pytest.mark.parametrize(("name", "first"), [("MNIST", 5_000), ("digits (embedded)", 0)])
def test_mnist_leaves_its_first_images_aside(name, first):
    batches = Batches(numbered(5_040, name), 8, 0, CPU, False)
    assert batches.per_epoch == (5_040 - first) // 8
    batches.seek(0)
    seen = labels_of(batches, batches.per_epoch)
    assert sorted(seen) == list(range(first, 5_040))


def test_grey_images_become_pixels_between_0_and_1():
    data = tiny_data()
    batches = Batches(data, 90, 0, CPU, False)
    batches.seek(0)
    images, labels = batches.next()
    order = batches._draws[0]
    assert torch.equal(images, data.train_images[order].reshape(90, 16) / 255)
    assert torch.equal(labels, data.train_labels[order])


@pytest.mark.parametrize("channels_last", [False, True])
def test_colour_images_are_augmented_as_drawn(channels_last):
    data = tiny_colours()
    batches = Batches(data, 30, 0, CPU, channels_last)
    batches.seek(1)
    order, rows, columns, flips = batches._draws[:, 30:60]
    for draws, high in ((rows, 4), (columns, 4), (flips, 2)):
        assert set(draws.tolist()) == set(range(high))
    images, labels = batches.next()
    assert torch.equal(labels, data.train_labels[order])
    assert torch.equal(images, augment(data.train_images[order], rows, columns, flips.bool()))
    if channels_last:
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_fewer_images_than_a_batch():
    with pytest.raises(HyperparameterError, match="batch_size=8 for 7 training images"):
        Batches(numbered(7), 8, 0, CPU, False)


@pytest.mark.parametrize("channels_last", [False, True])
def test_evaluation_in_colour_is_standardised_only(channels_last):
    data = tiny_colours(test=40)
    parts = list(evaluation_set(data, CPU, 16, channels_last))
    assert [len(labels) for _, labels in parts] == [16, 16, 8]
    assert torch.equal(torch.cat([images for images, _ in parts]), standardize(data.test_images))
    assert torch.equal(torch.cat([labels for _, labels in parts]), data.test_labels)


def test_evaluation_in_grey():
    data = tiny_data()
    ((images, _),) = evaluation_set(data, CPU, 10_000, False)
    assert torch.equal(images, data.test_images.reshape(40, 16) / 255)
