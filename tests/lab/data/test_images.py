"""Tensors hold what the files hold, in the promised shapes and types."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from virtualgrad.lab.data import load_cifar10, load_digits, load_mnist
from virtualgrad.lab.data.datasets import DATASETS


def test_mnist(mnist, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "mnist", mnist.asking())
    mnist.put(tmp_path)
    data = load_mnist(tmp_path)
    assert data.name == "MNIST" and "MD5" in data.source
    for split, images, labels in (
        ("train", data.train_images, data.train_labels),
        ("t10k", data.test_images, data.test_labels),
    ):
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert images.shape == (len(labels), 1, 28, 28)
        assert images.numpy().tobytes() == mnist.contents[f"{split}-images-idx3-ubyte"][16:]
        assert bytes(labels.tolist()) == mnist.contents[f"{split}-labels-idx1-ubyte"][8:]


def test_cifar10(cifar10, tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "cifar10", cifar10.asking())
    monkeypatch.setenv("VIRTUALGRAD_DATA", str(tmp_path))
    cifar10.put(tmp_path)
    data = load_cifar10()
    assert data.name == "CIFAR-10" and "SHA-1" in data.source
    train = [f"data_batch_{batch}" for batch in range(1, 6)]
    for images, labels, batches in (
        (data.train_images, data.train_labels, train),
        (data.test_images, data.test_labels, ["test_batch"]),
    ):
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert np.array_equal(images, np.concatenate([cifar10.images[b] for b in batches]))
        assert np.array_equal(labels, np.concatenate([cifar10.labels[b] for b in batches]))


def test_digits_are_embedded_and_say_so():
    data = load_digits()
    assert data.name == "digits (embedded)" and "not MNIST" in data.source
    assert data.train_images.shape == (1_297, 1, 8, 8) and data.test_images.shape == (500, 1, 8, 8)
    assert data.train_images.dtype == torch.uint8 and data.train_labels.dtype == torch.int64
    labels = torch.cat([data.train_labels, data.test_labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    images = torch.cat([data.train_images, data.test_images])
    steps = images.unique().tolist()
    assert steps == [round(value * 255 / 16 + 1e-9) for value in range(17)]
    assert sum(steps.index(value) for value in images.flatten().tolist()) == 561_718
    # The first digit is a zero: an empty middle inside a ring.
    assert data.train_labels[0] == 0
    assert data.train_images[0, 0, 3, 3:5].tolist() == [0, 0]


def test_a_linear_reader_learns_the_digits():
    data = load_digits()

    def features(images):
        flat = images.flatten(1).double() / 255
        return torch.cat([flat, torch.ones(len(flat), 1, dtype=torch.float64)], dim=1)

    target = torch.nn.functional.one_hot(data.train_labels, 10).double()
    x = features(data.train_images)
    weights = torch.linalg.solve(x.T @ x + 1e-2 * torch.eye(65), x.T @ target)
    guesses = (features(data.test_images) @ weights).argmax(1)
    assert (guesses == data.test_labels).double().mean() > 0.85


@pytest.mark.slow  # the process imports torch
def test_only_fetching_needs_the_lab_packages(tmp_path):
    """So a GPU machine with nothing but torch can train on files that were brought there."""
    code = """
import sys
absent = ("pooch", "PIL", "rich", "typer", "requests")
sys.modules.update(dict.fromkeys(absent))  # importing any of these now fails
from virtualgrad.lab.data import DataUnavailableError, augment, load_cifar10, load_digits
load_digits()
try:
    load_cifar10()
except DataUnavailableError as error:
    print(error)
"""
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VIRTUALGRAD_DATA": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "next step: pip install 'virtualgrad[lab]'" in outcome.stdout, outcome.stderr


def test_image_data_is_frozen():
    with pytest.raises(FrozenInstanceError):
        load_digits().name = "MNIST"
