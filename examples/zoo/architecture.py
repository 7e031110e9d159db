"""One architecture of ``transformers``: a tiny model with random weights, a batch, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

# Nothing else in these models has the size of the batch, so no axis is taken for samples by chance.
BATCH, LENGTH, ANSWER, VOCABULARY, CLASSES = 3, 7, 5, 40, 6

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers with a configuration of a few thousand parameters.

    Attributes:
        model_class: name of the class in ``transformers``.
        config: sizes and special tokens that differ from the class's default; dropout is off.
        inputs: makes a batch.
        labels: shape of the labels of a batch; None: each sample is the answer to itself (CLIP).
        uncovered: how the names of the parameters end that no linear site covers, known from
            reading the model's code, not from virtualgrad.
        mixes_samples: whether one sample's loss depends on the others of its batch.
        picks_rows: whether experts get rows of their own number each time, so that r has to be
            shared over positions.
        dtype: float64 wherever all of the model's kernels have it.
        variant: options that change which parameters there are, at any size.
    """

    model_class: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    labels: tuple[int, ...] | None
    uncovered: tuple[str, ...] = ()
    mixes_samples: bool = False
    picks_rows: bool = False
    dtype: torch.dtype = torch.float64
    variant: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 0) -> nn.Module:
        """The model with random weights, in training mode; nothing is downloaded."""
        torch.manual_seed(seed)
        return self._made_of(self.config | self.variant).to(self.dtype).train()

    def default_sizes(self) -> dict[str, int]:
        """Name -> size of every parameter at the class's default size; it takes no memory here."""
        with torch.device("meta"):
            model = self._made_of(self.variant)
        return {name: parameter.numel() for name, parameter in model.named_parameters()}

    def _made_of(self, config: dict[str, Any]) -> nn.Module:
        model_class = getattr(transformers, self.model_class)
        model: nn.Module = model_class(model_class.config_class(**config))
        return model

    def batch(self, seed: int = 1) -> tuple[Inputs, Tensor]:
        """(inputs, labels); the same for the same seed."""
        torch.manual_seed(seed)
        inputs = {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in self.inputs().items()
        }
        if self.labels is None:
            return inputs, torch.arange(BATCH)
        return inputs, torch.randint(0, CLASSES, (BATCH, *self.labels))

    def loss(self, model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
        """The mean cross entropy.

        Not the loss that the models compute themselves: that one casts to float32, also from
        float64, and an error of 1e-7 would hide behind it.
        """
        output = model(**inputs)
        if self.labels is None:
            return F.cross_entropy(output.logits_per_image, labels)
        logits = output.logits
        if self.model_class.endswith("Segmentation"):  # (N, classes, H, W) as it is
            return F.cross_entropy(logits, labels)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
