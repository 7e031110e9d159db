"""Batches of a data set that lies on the device as a whole, augmented there.

The order of an epoch and the random draws of its augmentation come from one seed and the number of
the epoch, so any step can be reached again without a generator's state. Nothing in :meth:`next`
depends on the host, so that a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.data import ImageData
from virtualgrad.lab.data.transform import augment, mnist_pixels, standardize

HELD_OUT = 5_000
"""The released code leaves the first images of MNIST's training set aside."""


@dataclass(frozen=True)
class EvaluationSet:
    """All test images, ready for the network, in batches."""

    images: Tensor
    labels: Tensor
    batch_size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(
            self.images.split(self.batch_size), self.labels.split(self.batch_size), strict=True
        )


def evaluation_set(
    data: ImageData, device: torch.device, batch_size: int, channels_last: bool
) -> EvaluationSet:
    """The test images, standardised but not augmented."""
    images = data.test_images.to(device)
    if _is_colour(data):
        ready = torch.cat([standardize(part.float()) for part in images.split(1_000)])
        ready = ready.to(memory_format=torch.channels_last) if channels_last else ready
    else:
        ready = mnist_pixels(images)
    return EvaluationSet(ready, data.test_labels.to(device), batch_size)


def _is_colour(data: ImageData) -> bool:
    return data.train_images.shape[1] == 3


class Batches:
    """The training batches of one run."""

    def __init__(
        self,
        data: ImageData,
        batch_size: int,
        seed: int,
        device: torch.device,
        channels_last: bool,
        *,
        compiled: bool = False,
    ) -> None:
        self._augment = torch.compile(augment, dynamic=False) if compiled else augment
        self.colour = _is_colour(data)
        first = HELD_OUT if data.name == "MNIST" else 0
        images = data.train_images[first:].to(device)
        self.images = images if self.colour else mnist_pixels(images)
        self.labels = data.train_labels[first:].to(device)
        self.batch_size = batch_size
        self.seed = seed
        self.channels_last = channels_last
        self.per_epoch = len(self.labels) // batch_size  # a last short batch is dropped
        if self.per_epoch == 0:
            raise HyperparameterError.of(
                given=f"batch_size={batch_size} for {len(self.labels)} training images",
                allowed="at most as many as there are images",
                todo="choose a smaller batch_size in the recipe",
            )
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self._within = torch.arange(batch_size, device=device)
        count = len(self.labels)
        # order, row and column offset, flip: four numbers per sample of an epoch
        self._draws = torch.zeros(4, count, dtype=torch.int64, device=device)
        self._ahead = torch.zeros(0, count, dtype=torch.int64)
        self._epoch_ahead: int | None = None

    def seek(self, step: int) -> None:
        """Make the given step the next one."""
        self.draw_ahead(step)
        _, within = divmod(step, self.per_epoch)
        self._draws[: len(self._ahead)].copy_(self._ahead)
        self.position.fill_(within * self.batch_size)

    def draw_ahead(self, step: int) -> None:
        """Draw on the host what the epoch of a step needs; :meth:`seek` brings it to the device."""
        epoch = step // self.per_epoch
        if epoch == self._epoch_ahead:
            return
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        count = len(self.labels)
        draws = [torch.randperm(count, generator=generator)]
        if self.colour:
            draws += [torch.randint(0, high, (count,), generator=generator) for high in (4, 4, 2)]
        self._ahead, self._epoch_ahead = torch.stack(draws), epoch

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: images and labels."""
        order, rows, columns, flips = self._draws[:, self.position + self._within].unbind(0)
        self.position += self.batch_size
        labels = self.labels[order]
        images = self.images[order]
        if not self.colour:
            return images, labels
        images = self._augment(images, rows, columns, flips.bool())
        if self.channels_last:
            images = images.to(memory_format=torch.channels_last)
        return images, labels
